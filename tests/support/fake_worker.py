"""A worker on a real socket whose every answer is scripted: raw HTTP/1.1 under the test's control.

A script is `async def script(call: Call) -> None`; it writes to the connection through `call`, and may wait on events,
stop in the middle or cut the connection. `FakeWorker.scripts` maps a path to one; the rest has plain defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

TOKENS = ("A", "B", "C", "D")


class Call:
    """One request and the connection to answer it on."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.path = path
        self.headers = headers
        self.raw = body
        self.writer = writer
        self.cut_off = False

    @property
    def json(self) -> dict[str, Any]:
        decoded = json.loads(self.raw)
        assert isinstance(decoded, dict)
        return decoded

    @property
    def request_type(self) -> str | None:
        return (self.json.get("disaggregated_params") or {}).get("request_type")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: Any, *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(data)}", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    async def start_stream(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def event(self, data: Any) -> None:
        await self.chunk(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

    async def chunk(self, payload: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def end_stream(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """End the connection at once, whatever was promised."""
        self.cut_off = True
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


class FakeWorker:
    """`calls` are the POSTs in order of arrival; `lost` those whose client left before the script had ended."""

    def __init__(self, role: str, **server_info: Any) -> None:
        self.role = role
        self.server_info: dict[str, Any] | None = {"engine": "trtllm-disagg", "role": role, **server_info}
        self.scripts: dict[str, Script] = {}
        self.health = 200
        self.calls: list[Call] = []
        self.lost: list[Call] = []
        self.released: list[int] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def legs(self, request_type: str | None = None) -> list[Call]:
        calls = [call for call in self.calls if call.path.startswith("/v1/")]
        return calls if request_type is None else [call for call in calls if call.request_type == request_type]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._writers)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=64 * 1024 * 1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut all connections."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        async with asyncio.timeout(5):
            while self._writers:  # noqa: ASYNC110 - handlers of cut connections end within a few turns of the loop
                await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                call = Call(path, headers, body, writer)
                if method == "POST":
                    self.calls.append(call)
                await self._answer(call, reader)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, call: Call, reader: asyncio.StreamReader) -> None:
        """Run the script until it ends or the client leaves."""
        script = asyncio.ensure_future(self._script(call)(call))
        gone = asyncio.ensure_future(_at_eof(reader))
        try:
            await asyncio.wait((script, gone), return_when=asyncio.FIRST_COMPLETED)
            if not script.done():
                self.lost.append(call)
        finally:
            for task in (script, gone):
                task.cancel()
            results = await asyncio.gather(script, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], (OSError, RuntimeError)):
            raise results[0]

    def _script(self, call: Call) -> Script:
        if call.path in self.scripts:
            return self.scripts[call.path]
        if call.path == "/handoff/release":
            return self._release
        if call.path.startswith("/v1/") and call.raw:
            return answer_context if call.request_type == "context_only" else answer_generation
        return self._control

    async def _release(self, call: Call) -> None:
        self.released.append(call.json["disagg_request_id"])
        await call.answer(200, {"released": True})

    async def _control(self, call: Call) -> None:
        if call.path == "/server_info" and self.server_info is not None:
            await call.answer(200, self.server_info)
        elif call.path == "/health":
            await call.answer(self.health, {})
        elif call.path == "/v1/models":
            await call.answer(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            await call.answer(404, {"detail": "Not Found"})


async def _at_eof(reader: asyncio.StreamReader) -> None:
    """Returns when the client has left. A test's client sends nothing while it waits for an answer."""
    while not reader.at_eof():  # noqa: ASYNC110 - reading would take the first byte of a next request
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------- scripts


def context_body(call: Call, finish_reason: str = "not_finished", **params: Any) -> dict[str, Any]:
    """The answer of a context worker of this project to `call`."""
    handoff_id = call.json["disaggregated_params"]["disagg_request_id"]
    own = {
        "request_type": "context_only",
        "first_gen_tokens": [65],
        "ctx_request_id": handoff_id,
        "disagg_request_id": handoff_id,
        "schedule_style": 0,
    }
    if finish_reason == "not_finished":
        own["encoded_opaque_state"] = "c3RhdGU="
    chat = "chat" in call.path
    said: dict[str, Any] = {"message": {"role": "assistant", "content": "A"}} if chat else {"text": "A"}
    return {
        "id": "cmpl-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 7,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                **said,
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": None,
                "disaggregated_params": {**own, **params},
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 1,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "prompt_token_ids": [1, 2, 3],
    }


async def answer_context(call: Call) -> None:
    await call.answer(200, context_body(call))


async def finish_in_prefill(call: Call) -> None:
    """The first token ended the request."""
    await call.answer(200, context_body(call, "length"))


def chunk_of(call: Call, token: str, finish_reason: str | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {"content": token}} if "chat" in call.path else {"text": token}
    return {
        "id": "cmpl-1",
        "object": "chat.completion.chunk" if "chat" in call.path else "text_completion",
        "created": 7,
        "model": "fake",
        "choices": [{"index": 0, **said, "finish_reason": finish_reason}],
    }


async def answer_generation(call: Call) -> None:
    """TOKENS, streamed if asked so; the first one is the hand-off's."""
    if not call.json.get("stream"):
        usage = {"prompt_tokens": 3, "completion_tokens": len(TOKENS), "total_tokens": 3 + len(TOKENS)}
        choice = {"index": 0, "text": "".join(TOKENS), "finish_reason": "length"}
        await call.answer(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})
        return
    await call.start_stream()
    for token in TOKENS:
        await call.event(chunk_of(call, token, "length" if token == TOKENS[-1] else None))
    await call.end_stream()


def die_after(events: int) -> Script:
    """A stream that is cut after so many tokens."""

    async def script(call: Call) -> None:
        await call.start_stream()
        for token in TOKENS[:events]:
            await call.event(chunk_of(call, token))
        await asyncio.sleep(0.02)  # let what was written arrive before the reset overtakes it
        call.cut()

    return script


def fail_with(status: int, body: Any = None, *headers: str) -> Script:
    async def script(call: Call) -> None:
        default = {"error": {"message": f"scripted {status}", "type": "server_error", "param": "p", "code": "scripted"}}
        await call.answer(status, default if body is None else body, *headers)

    return script


def hang_until(event: asyncio.Event, then: Script) -> Script:
    async def script(call: Call) -> None:
        await event.wait()
        await then(call)

    return script


async def cut_at_once(call: Call) -> None:
    call.cut()


@contextlib.asynccontextmanager
async def fake_workers(*workers: FakeWorker) -> AsyncIterator[None]:
    for worker in workers:
        await worker.start()
    try:
        yield
    finally:
        for worker in workers:
            await worker.stop()
