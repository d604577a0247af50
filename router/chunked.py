"""HTTP/1.1 chunked bodies, split at chunk boundaries with the frames left on.

The relay forwards wire bytes as they came. It holds back an incomplete chunk, so that whatever it has forwarded can be
followed by a chunk of its own when the sender dies.
"""

from __future__ import annotations

MAX_CHUNK_BYTES = 64 * 1024 * 1024
_MAX_LINE = 1024  # a size line with extensions, or a trailer line
LAST_CHUNK = b"0\r\n\r\n"


class ChunkError(ValueError):
    """The peer's framing is broken."""


class ChunkScanner:
    """Feed wire bytes, get back whole chunks. `finished` once the last chunk and its trailer have arrived."""

    __slots__ = ("_held", "_in_trailer", "_missing", "chunks", "excess", "finished")

    def __init__(self) -> None:
        self._held: list[bytes] = []  # the beginning of an incomplete chunk
        self._missing = 0  # bytes that must come before looking at it again
        self._in_trailer = False
        self.chunks = 0  # whole data chunks so far
        self.finished = False
        self.excess = False  # bytes came after the end of the body

    def feed(self, data: bytes) -> bytes:
        """The whole data chunks that `data` completes, framed; neither the last chunk nor trailers."""
        if self._held:
            self._held.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return b""
            data = b"".join(self._held)
            self._held.clear()
        position = 0 if self._in_trailer else self._walk(data)
        whole = data if position == len(data) else data[:position]
        if self._in_trailer and not self.finished:
            self._read_trailer(data, position)
        return whole

    def _walk(self, data: bytes) -> int:
        """Offset of the first byte that belongs to no whole data chunk."""
        position, length = 0, len(data)
        while position < length:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                if length - position > _MAX_LINE:
                    raise ChunkError("chunk size line too long")
                self._hold(data, position, 1)
                return position
            try:
                size = int(data[position:line_end].partition(b";")[0], 16)
            except ValueError:
                raise ChunkError(f"bad chunk size {data[position : position + 20]!r}") from None
            if size == 0:
                self._in_trailer = True
                return position
            if not 0 < size <= MAX_CHUNK_BYTES:
                raise ChunkError(f"chunk of {size} bytes, at most {MAX_CHUNK_BYTES}")
            end = line_end + 4 + size
            if end > length:
                self._hold(data, position, end - length)
                return position
            if data[end - 2 : end] != b"\r\n":
                raise ChunkError("chunk without its end")
            self.chunks += 1
            position = end
        return position

    def _hold(self, data: bytes, position: int, missing: int) -> None:
        self._held.append(data[position:])
        self._missing = missing

    def _read_trailer(self, data: bytes, position: int) -> None:
        """`position` is at the last chunk's size line; the body ends with the next empty line."""
        line = data.find(b"\r\n", position) + 2
        while True:
            line_end = data.find(b"\r\n", line)
            if line_end < 0:
                if len(data) - line > _MAX_LINE:
                    raise ChunkError("trailer line too long")
                self._hold(data, position, 1)
                return
            if line_end == line:
                self.finished = True
                self.excess = line_end + 2 != len(data)
                return
            line = line_end + 2


def frame(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def unframe(wire: bytes) -> bytes:
    """The payload of whole chunks, as `ChunkScanner.feed` returns them."""
    parts: list[bytes] = []
    position = 0
    while position < len(wire):
        line_end = wire.find(b"\r\n", position)
        size = int(wire[position:line_end].partition(b";")[0], 16)
        parts.append(wire[line_end + 2 : line_end + 2 + size])
        position = line_end + 4 + size
    return parts[0] if len(parts) == 1 else b"".join(parts)
