"""HTTP details of the client's side: how requests may arrive, and how answers leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_worker import Call, FakeWorker, chunk_of, fake_workers
from running_router import RunningRouter, eventually, running_router, static_config

import router.front_door
from router.chunked import unframe

PATH = "/v1/completions"
BODY = json.dumps({"model": "fake", "prompt": "hi"}).encode()


@contextlib.asynccontextmanager
async def pair(**config: Any) -> AsyncIterator[tuple[RunningRouter, FakeWorker, FakeWorker]]:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen], **config)) as running:
        yield running, ctx, gen


def post(body: bytes = BODY, *headers: str, version: str = "1.1", path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def split_answers(data: bytes) -> list[tuple[bytes, bytes]]:
    """(head, body) of each answer with a content-length."""
    answers = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        answers.append((head, rest[:length]))
        data = rest[length:]
    return answers


@pytest.mark.parametrize("size", [1, 7, 50])
async def test_a_request_may_come_in_pieces(size: int) -> None:
    async with pair() as (router, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        data = post(BODY, "Connection: close")
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_a_chunked_upload_is_read() -> None:
    async with pair() as (router, ctx, _):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:5], BODY[5:6], BODY[6:]))
        answer = await router.raw(head + chunks + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert ctx.legs()[0].json["prompt"] == "hi"


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with pair() as (router, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head, _, body = post(BODY, "Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Hot and cold routes mixed, all in one write."""
    async with pair() as (router, ctx, _):
        get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        answers = split_answers(
            await router.raw(post() + get + post() + post(b"[") + get + post(BODY, "Connection: close"))
        )
        kinds = [head.split(b" ")[1] for head, _ in answers]
        assert kinds == [b"200", b"200", b"200", b"400", b"200", b"200"]
        assert b"version" in answers[1][1] and b"choices" in answers[2][1] and b"version" in answers[4][1]
        assert len(ctx.legs()) == 3


async def test_keep_alive_and_close() -> None:
    async with pair() as (router, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        for _ in range(2):
            writer.write(post())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection: close" not in head
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        writer.write(post(BODY, "Connection: close"))
        assert b"connection: close" in await reader.read()
        writer.close()


async def test_http_1_0_clients_get_no_chunks() -> None:
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    async with pair() as (router, _, _):
        head, _, rest = (await router.raw(post(body, version="1.0"))).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("announced", [True, False])
async def test_an_oversize_body_is_413_and_the_connection_ends(
    announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.front_door, "MAX_REQUEST_BYTES", 100)
    big = b'{"prompt":"' + b"x" * 500 + b'"}'
    async with pair() as (running, ctx, _):
        if announced:
            data = post(big)[:-300]
        else:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            data = head + b"%x\r\n%b\r\n" % (len(big), big)
        answer = await running.raw(data)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
        assert not ctx.calls


async def test_a_query_string_does_not_hide_the_hot_route() -> None:
    async with pair() as (router, ctx, _):
        assert (await router.post(f"{PATH}?x=1", prompt="hi")).status_code == 200
        assert ctx.legs()[0].path == PATH


async def test_everything_else_falls_through_to_the_application() -> None:
    async with pair() as (router, _, _):
        client = router.client
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", PATH, 405, "POST"),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("POST", "/health", 405, "GET"),
        ("POST", "/v1/v1/completions", 404, None),
        ("POST", "//v1/completions", 404, None),
        ("POST", "/v1/nope", 404, None),
        ("GET", "/nowhere", 404, None),
        ("GET", "/v1/models/nope", 404, None),
    ],
)
async def test_unknown_routes_and_methods_are_error_objects(
    method: str, path: str, status: int, allow: str | None
) -> None:
    """C062"""
    async with pair() as (router, _, _):
        answer = await router.client.request(method, path)
        assert answer.status_code == status and answer.headers.get("allow") == allow
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"


async def test_a_stream_says_that_it_is_not_to_be_kept_back() -> None:
    """C063"""
    async with pair() as (router, _, _):
        headers = {"accept-encoding": "gzip"}
        answer = await router.client.post(PATH, json={"prompt": "hi", "stream": True}, headers=headers)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers


async def test_losing_the_client_during_the_upload_costs_nothing() -> None:
    async with pair() as (router, ctx, _):
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post()[:-5])
        await eventually(lambda: router.router.metrics.total_requests == 1)
        writer.close()
        await eventually(lambda: router.router.metrics.client_disconnects == 1)
        assert not ctx.calls


async def test_a_slow_client_pauses_the_worker() -> None:
    """What a client does not read is held by the kernel's buffers, not in the router's memory."""
    sent = 0
    payload = b"x" * 65536

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.start_stream()
        for _ in range(1600):  # 100 MiB
            await call.event(payload)
            sent += len(payload)
        await call.end_stream()

    async with pair() as (router, _, gen):
        gen.scripts[PATH] = flood
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
        writer.write(post(json.dumps({"prompt": "hi", "stream": True}).encode(), "Connection: close"))
        await reader.readuntil(b"\r\n")
        stalled = 0
        while True:
            before = sent
            await asyncio.sleep(0.2)
            stalled = stalled + 1 if sent == before else 0
            if stalled == 2:
                break
        assert sent < 60 * 2**20
        total = 0
        while data := await reader.read(2**20):
            total += len(data)
        assert total > 1600 * len(payload)
        writer.close()


async def test_the_stream_arrives_token_by_token() -> None:
    step = asyncio.Event()

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.event(chunk_of(call, "A"))
        await step.wait()
        await call.event(chunk_of(call, "B"))
        await call.end_stream()

    async with pair() as (router, _, gen):
        gen.scripts[PATH] = script
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post(json.dumps({"prompt": "hi", "stream": True}).encode(), "Connection: close"))
        first = await asyncio.wait_for(reader.readuntil(b"\n\n"), 5)
        assert b'"text": "A"' in first
        step.set()
        rest = await reader.read()
        assert b'"text": "B"' in rest and rest.endswith(b"0\r\n\r\n")
        wire = b"".join((first.partition(b"\r\n\r\n")[2], rest))
        assert unframe(wire[: -len(b"0\r\n\r\n")]).endswith(b"data: [DONE]\n\n")
        writer.close()
