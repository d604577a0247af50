"""The router's own HTTP/1.1 client for the two hot legs: asyncio protocols over pooled keep-alive connections.

One `Connection` carries one exchange at a time. An answer that is an event stream is handed out at its first whole
chunk and relayed from there; every other answer is handed out whole. An exchange that is cancelled, or breaks, closes
its connection: the worker sees the disconnect and aborts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from router.chunked import ChunkError, ChunkScanner, frame, unframe

MAX_HEAD_BYTES = 128 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024
CONNECT_TIMEOUT = 5.0  # seconds

_HEAD, _LENGTH, _CHUNKED, _UNTIL_CLOSE, _IDLE = range(5)


class ExchangeFailed(Exception):
    """No usable answer: the worker could not be reached, went away, or does not speak HTTP/1.1."""


class Unreachable(ExchangeFailed):
    """No connection could be opened."""


class ClosedEarly(ExchangeFailed):
    """The connection ended before the first byte of an answer: on a reused one that may be mere old age."""


class StreamSink(Protocol):
    """Where an event stream goes."""

    def relay(self, wire: bytes) -> None:
        """Whole chunks, framed."""

    def attach(self, source: Connection | None) -> None:
        """Whom to pause while the sink is full; None when the stream is over."""


class Answer:
    """`body` is None for an event stream, whose `stream` is to be relayed or aborted by whoever holds the answer."""

    __slots__ = ("body", "head", "status", "stream")

    def __init__(self, status: int, head: bytes, body: bytes | None, stream: Connection | None = None) -> None:
        self.status = status
        self.head = head
        self.body = body
        self.stream = stream

    def discard(self) -> None:
        """Give up an event stream that nobody will relay."""
        if self.stream is not None:
            self.stream.abort()

    def header(self, name: bytes) -> bytes:
        """Value of the lower-case `name`, b"" when absent."""
        return _header(self.head, self.head.lower(), b"\r\n" + name + b":")


def _header(head: bytes, lowered: bytes, field: bytes) -> bytes:
    start = lowered.find(field)
    if start < 0:
        return b""
    start += len(field)
    end = lowered.find(b"\r\n", start)
    return head[start : end if end >= 0 else None].strip()


class Connection(asyncio.Protocol):
    __slots__ = (
        "_ended",
        "_error",
        "_head",
        "_keep",
        "_left",
        "_mode",
        "_parts",
        "_paused",
        "_pool",
        "_received",
        "_scanner",
        "_serial",
        "_sink",
        "_status",
        "_streaming",
        "_waiter",
        "closed",
        "transport",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport
        self.closed = False
        self._mode = _IDLE
        self._serial = 0
        self._waiter: asyncio.Future[Answer | None] | None = None
        self._paused = False

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._pool.forget(self)
        if self._mode == _IDLE:
            return
        if self._mode == _UNTIL_CLOSE and error is None:
            self._end()
        elif self._received:
            self._break(ExchangeFailed(f"connection lost in the middle of the answer ({error or 'closed by peer'})"))
        else:
            self._break(ClosedEarly(f"connection lost before an answer ({error or 'closed by peer'})"))

    def data_received(self, data: bytes) -> None:
        self._received = True
        try:
            if self._mode == _HEAD:
                data = self._read_head(data)
                if self._mode == _HEAD:
                    return
            if self._mode == _IDLE:
                if data:
                    raise ChunkError("bytes beyond the end of the answer")
                return
            self._read_body(data)
        except ValueError as error:
            self._break(ExchangeFailed(f"not an HTTP/1.1 answer: {error}"))
            self.transport.abort()

    # ------------------------------------------------------------ one exchange

    async def exchange(self, request: Sequence[bytes]) -> Answer:
        """Send `request` and wait for the answer, or for the first chunk of an event stream."""
        self._mode = _HEAD
        self._serial = serial = self._serial + 1
        self._parts: list[bytes] = []
        self._head = b""
        self._received = self._ended = self._streaming = False
        self._error: ExchangeFailed | None = None
        self._sink: StreamSink | None = None
        self._scanner: ChunkScanner | None = None
        self._waiter = self._pool.loop.create_future()
        if len(request) == 1:
            self.transport.write(request[0])
        else:
            self.transport.writelines(request)
        try:
            answer = await self._waiter
        except asyncio.CancelledError:
            if self._serial == serial and (self._mode != _IDLE or self._streaming):
                self.abort()  # not when the whole answer came in the meantime: the next user may have the connection
            raise
        assert answer is not None
        return answer

    async def relay(self, sink: StreamSink) -> None:
        """Hand the event stream to `sink` until its end. Raises ExchangeFailed if it ends early."""
        serial = self._serial
        sink.attach(self)
        try:
            if self._parts:
                parts, self._parts = self._parts, []
                sink.relay(parts[0] if len(parts) == 1 else b"".join(parts))
            if self._error is not None:
                raise self._error
            if self._ended:
                self._hand_back()
                return
            self._sink = sink
            self._waiter = self._pool.loop.create_future()
            await self._waiter
        except asyncio.CancelledError:
            if self._serial == serial and self._mode != _IDLE:
                self.abort()
            raise
        finally:
            sink.attach(None)

    def abort(self) -> None:
        """Close now: whatever the worker is doing for this exchange is not wanted any more."""
        self._mode = _IDLE
        self._waiter = self._sink = None
        self.closed = True
        self.transport.abort()

    @property
    def chunks(self) -> int:
        """Whole chunks of the present or last answer; 0 where the worker does not chunk."""
        return 0 if self._scanner is None else self._scanner.chunks

    def pause(self) -> None:
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed:
            self.transport.resume_reading()
        self._paused = False

    # ------------------------------------------------------------ reading

    def _read_head(self, data: bytes) -> bytes:
        """Bytes after the head; the mode stays _HEAD while the head is incomplete."""
        if self._head:
            data = self._head + data
        end = data.find(b"\r\n\r\n")
        if max(end, len(data) if end < 0 else 0) > MAX_HEAD_BYTES:
            raise ChunkError(f"head of more than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            self._head = data
            return b""
        head, rest = data[:end], data[end + 4 :]
        if not head.startswith(b"HTTP/1.") or len(head) < 12:
            raise ChunkError(f"starts with {head[:20]!r}")
        status = int(head[9:12])
        if status < 200:
            self._head = b""
            return self._read_head(rest) if rest else b""
        self._open_body(status, head)
        return rest

    def _open_body(self, status: int, head: bytes) -> None:
        lowered = head.lower()
        self._status, self._head = status, head
        self._keep = head[7:8] == b"1" and b"close" not in _header(lowered, lowered, b"\r\nconnection:")
        content_type = _header(lowered, lowered, b"\r\ncontent-type:")
        self._streaming = status == 200 and content_type.startswith(b"text/event-stream")
        if b"chunked" in _header(lowered, lowered, b"\r\ntransfer-encoding:"):
            self._mode = _CHUNKED
            self._scanner = ChunkScanner()
            return
        length = _header(lowered, lowered, b"\r\ncontent-length:")
        if not length and status not in (204, 304):
            self._mode, self._keep = _UNTIL_CLOSE, False
            self._left = MAX_BODY_BYTES
            return
        self._mode = _LENGTH
        self._left = int(length or b"0")
        if not 0 <= self._left <= MAX_BODY_BYTES:
            raise ChunkError(f"content-length {self._left}, at most {MAX_BODY_BYTES}")

    def _read_body(self, data: bytes) -> None:
        if self._scanner is not None:
            whole = self._scanner.feed(data)
            if whole:
                self._deliver(whole)
            if self._scanner.finished:
                self._keep = self._keep and not self._scanner.excess
                self._end()
            return
        self._left -= len(data)
        if self._left < 0:
            raise ChunkError("more bytes than announced")
        if data:
            self._deliver(frame(data) if self._streaming else data)
        if self._left == 0 and self._mode == _LENGTH:
            self._end()

    def _deliver(self, wire: bytes) -> None:
        if self._sink is not None:
            self._sink.relay(wire)
            return
        self._parts.append(wire)
        if self._streaming and self._waiter is not None:
            self._resolve(Answer(self._status, self._head, None, self))

    def _end(self) -> None:
        self._ended = True
        self._keep = self._keep and self._mode != _UNTIL_CLOSE
        self._mode = _IDLE
        if not self._streaming:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            answer = Answer(self._status, self._head, body if self._scanner is None else unframe(body))
            self._hand_back()
            self._resolve(answer)
        elif self._sink is not None:
            self._hand_back()
            self._resolve(None)
        else:  # relay() hands the connection back, once it has taken the parts
            self._resolve(Answer(self._status, self._head, None, self))

    def _hand_back(self) -> None:
        self.resume()
        self._sink = None
        self._pool.give_back(self, self._keep)

    def _resolve(self, answer: Answer | None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _break(self, error: ExchangeFailed) -> None:
        self._mode = _IDLE
        self._error = error
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


class ConnectionPool:
    """Keep-alive connections to one worker, most recently used first."""

    __slots__ = ("_idle", "_open", "closed", "host", "loop", "port")

    def __init__(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.host, self.port, self.loop = host, port, loop
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.closed = False

    def __repr__(self) -> str:
        return f"ConnectionPool({self.host}:{self.port}, open={len(self._open)}, idle={len(self._idle)})"

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def request(self, request: Sequence[bytes]) -> Answer:
        """One exchange. It is tried again on a new connection only if a kept one closed without a byte of answer."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed or connection.transport.is_closing():
                continue
            try:
                return await connection.exchange(request)
            except ClosedEarly:
                break
        return await (await self._connect()).exchange(request)

    async def _connect(self) -> Connection:
        factory: Callable[[], Connection] = lambda: Connection(self)  # noqa: E731
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await self.loop.create_connection(factory, self.host, self.port)
        except TimeoutError:
            raise Unreachable(f"no connection to {self.host}:{self.port} within {CONNECT_TIMEOUT:g} s") from None
        except OSError as error:
            raise Unreachable(f"cannot connect to {self.host}:{self.port}: {error}") from error
        self._open.add(connection)
        return connection

    def give_back(self, connection: Connection, keep: bool) -> None:
        if keep and not self.closed and not connection.closed:
            self._idle.append(connection)
        else:
            connection.closed = True
            connection.transport.close()

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle now, and what is busy when its exchange ends."""
        self.closed = True
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
