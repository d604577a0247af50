"""The upstream client against raw sockets that answer byte by byte as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from router.chunked import unframe
from router.http_client import (
    MAX_BODY_BYTES,
    Answer,
    ClosedEarly,
    Connection,
    ConnectionPool,
    ExchangeFailed,
    Unreachable,
)

REQUEST = [b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[tuple[ConnectionPool, list[asyncio.StreamWriter]]]:
    """`script` runs once a connection; its end closes the connection."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = ConnectionPool("127.0.0.1", server.sockets[0].getsockname()[1], asyncio.get_running_loop())
    try:
        yield pool, writers
    finally:
        pool.close()
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0.01)


def answering(*pieces: bytes, requests: int = 1) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(requests):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)

    return script


class Sink:
    def __init__(self) -> None:
        self.wire: list[bytes] = []
        self.source: Connection | None = None

    def relay(self, wire: bytes) -> None:
        self.wire.append(wire)

    def attach(self, source: Connection | None) -> None:
        self.source = source

    @property
    def payload(self) -> bytes:
        return unframe(b"".join(self.wire))


async def stream_of(answer: Answer, sink: Sink) -> None:
    assert answer.body is None and answer.stream is not None
    await answer.stream.relay(sink)


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


PLAIN = b"HTTP/1.1 201 Created\r\nContent-Type: text/x\r\nX-Y:  some value \r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n12\r\ndata: 2\n\ndata: 3\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
@pytest.mark.parametrize(
    ("wire", "status"), [(PLAIN, 201), (CHUNKED, 200), (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 201)]
)
async def test_whole_answers_however_they_are_cut(wire: bytes, status: int, size: int) -> None:
    async with raw_server(answering(*pieces_of(wire, size))) as (pool, _):
        answer = await pool.request(REQUEST)
        assert (answer.status, answer.body) == (status, b"hello")


async def test_headers_by_name() -> None:
    async with raw_server(answering(PLAIN)) as (pool, _):
        answer = await pool.request(REQUEST)
        assert answer.header(b"x-y") == b"some value" and answer.header(b"nothing") == b""


@pytest.mark.parametrize("size", [1, 2, 5, 11, 1000])
async def test_event_streams_however_they_are_cut(size: int) -> None:
    async with raw_server(answering(*pieces_of(STREAM, size))) as (pool, _):
        answer, sink = await pool.request(REQUEST), Sink()
        await stream_of(answer, sink)
        assert sink.payload == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
        assert answer.stream is not None and answer.stream.chunks == 2
        assert sink.source is None
        for wire in sink.wire:
            unframe(wire)  # whole chunks in each piece


async def test_an_event_stream_without_chunks_is_framed() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with raw_server(answering(head, b"data: 1\n\n", b"data: 2\n\n")) as (pool, _):
        sink = Sink()
        await stream_of(await pool.request(REQUEST), sink)
        assert sink.payload == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("code", [204, 304])
async def test_answers_without_a_body(code: int) -> None:
    async with raw_server(answering(b"HTTP/1.1 %d X\r\n\r\n" % code, requests=2)) as (pool, writers):
        for _ in range(2):
            assert (await pool.request(REQUEST)).body == b""
        assert len(writers) == 1


async def test_connections_are_kept_and_reused() -> None:
    async with raw_server(answering(PLAIN, requests=5)) as (pool, writers):
        for _ in range(5):
            await pool.request(REQUEST)
        assert len(writers) == 1 and pool.open_connections == 1


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx",
    ],
)
async def test_connections_that_are_to_close_are_not_kept(wire: bytes) -> None:
    async with raw_server(answering(wire, requests=2)) as (pool, writers):
        for _ in range(2):
            assert (await pool.request(REQUEST)).body == b"x"
        assert len(writers) == 2


async def test_a_kept_connection_that_died_is_replaced() -> None:
    async with raw_server(answering(PLAIN, requests=1)) as (pool, writers):
        await pool.request(REQUEST)
        assert (await pool.request(REQUEST)).body == b"hello"  # the server closed after the first answer
        assert len(writers) == 2


async def test_a_new_connection_that_dies_is_not_replaced() -> None:
    async with raw_server(answering()) as (pool, writers):
        with pytest.raises(ClosedEarly):
            await pool.request(REQUEST)
        assert len(writers) == 1


async def test_nothing_is_repeated_once_a_byte_has_come() -> None:
    accepted = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await answering(PLAIN)(reader, writer)
        await answering(b"HTT")(reader, writer)

    async with raw_server(script) as (pool, _):
        await pool.request(REQUEST)
        with pytest.raises(ExchangeFailed, match="middle of the answer"):
            await pool.request(REQUEST)
        assert accepted == 1


@pytest.mark.parametrize("cut", [len(STREAM_HEAD) + 14, len(STREAM_HEAD) + 20, len(STREAM) - 2])
async def test_a_stream_that_ends_early_gives_its_whole_chunks_and_fails(cut: int) -> None:
    async with raw_server(answering(STREAM[:cut])) as (pool, _):
        answer, sink = await pool.request(REQUEST), Sink()
        with pytest.raises(ExchangeFailed):
            await stream_of(answer, sink)
        assert sink.payload in (b"data: 1\n\n", b"data: 1\n\ndata: 2\n\ndata: 3\n\n")
        assert sink.source is None


async def test_a_stream_that_ends_before_its_first_chunk_fails_the_request() -> None:
    async with raw_server(answering(STREAM_HEAD + b"9\r\nda")) as (pool, _):
        with pytest.raises(ExchangeFailed):
            await pool.request(REQUEST)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 30000 + b"\r\n",
    ],
)
async def test_nonsense_fails_and_closes(wire: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(wire)(reader, writer)
        await reader.read()

    async with raw_server(script) as (pool, _):
        with pytest.raises(ExchangeFailed):
            await pool.request(REQUEST)
        await asyncio.sleep(0.01)
        assert pool.open_connections == 0


async def test_unasked_bytes_end_an_idle_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(PLAIN)(reader, writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with raw_server(script) as (pool, _):
        await pool.request(REQUEST)
        await asyncio.sleep(0.05)
        assert pool.open_connections == 0


async def test_no_listener_is_unreachable() -> None:
    async with raw_server(answering()) as (pool, _):
        port = pool.port
    with pytest.raises(Unreachable):
        await ConnectionPool("127.0.0.1", port, asyncio.get_running_loop()).request(REQUEST)


@pytest.mark.parametrize("when", ["before the answer", "in the stream"])
async def test_cancelling_closes_the_connection(when: str) -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if when == "in the stream":
            await answering(STREAM[:-5])(reader, writer)
        try:
            await reader.read()
        finally:
            left.set()

    async def use(pool: ConnectionPool) -> None:
        await stream_of(await pool.request(REQUEST), Sink())

    async with raw_server(script) as (pool, _):
        task = asyncio.ensure_future(use(pool))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(left.wait(), 5)
        assert pool.open_connections == 0


async def test_a_stream_is_paused_and_resumed() -> None:
    paused = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(STREAM[:-20])(reader, writer)
        await paused.wait()
        writer.write(STREAM[-20:])
        await writer.drain()
        await reader.read()

    async with raw_server(script) as (pool, _):
        answer, sink = await pool.request(REQUEST), Sink()
        relay = asyncio.ensure_future(stream_of(answer, sink))
        await asyncio.sleep(0)
        source = sink.source
        assert source is not None
        source.pause()
        paused.set()
        await asyncio.sleep(0.05)
        assert not relay.done()
        source.resume()
        await asyncio.wait_for(relay, 5)
        assert sink.payload.count(b"data") == 3


async def test_a_discarded_stream_closes_its_connection() -> None:
    async with raw_server(answering(STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n", b"")) as (pool, _):
        answer = await pool.request(REQUEST)
        answer.discard()
        await asyncio.sleep(0.01)
        assert pool.open_connections == 0


async def test_exchanges_do_not_mix_under_cancellation() -> None:
    """Cancelled users never get at the connection of the next one."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(line), line))

    async def use(pool: ConnectionPool, number: int) -> None:
        for turn in range(20):
            path = b"/%d-%d" % (number, turn)
            answer = await pool.request([b"POST %b HTTP/1.1\r\n\r\n" % path])
            assert answer.body == path

    async with raw_server(echo) as (pool, _):
        tasks = [asyncio.ensure_future(use(pool, number)) for number in range(30)]
        for turn in range(10):
            await asyncio.sleep(0.001)
            tasks[turn * 3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
