"""Frames on a socket between two processes: 4 bytes little-endian length, then the payload. No torch, no asyncio."""

from __future__ import annotations

import socket
import struct
import threading

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 1024 * 1024


class FrameError(Exception):
    """What comes in is no frame; the channel is of no use any more."""


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME:
        raise FrameError(f"a frame of {len(payload)} bytes, at most {MAX_FRAME}")
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Bytes in any pieces → whole payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes is announced, at most {MAX_FRAME}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads


class Channel:
    """The blocking side: one thread receives, any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._splitter = FrameSplitter()
        self._received: list[bytes] = []
        self._sending = threading.Lock()

    def receive(self) -> bytes | None:
        """The next payload; None at the end of file or when the connection broke."""
        while not self._received:
            try:
                data = self._socket.recv(1 << 18)
            except OSError:
                return None
            if not data:
                return None
            self._received = self._splitter.feed(data)[::-1]
        return self._received.pop()

    def send(self, payloads: list[bytes]) -> None:
        """All of them, in one piece. The other side's death is noticed by `receive` alone."""
        data = b"".join(map(frame, payloads))
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                pass

    def shut(self) -> None:
        """The other side sees the end of the file, and `receive` here too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.close()
