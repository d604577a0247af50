"""A worker's application over a scripted engine, in process or behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine
from starlette.applications import Starlette

import context_worker.app
import generation_worker.app
from context_worker.app import Worker, WorkerOptions
from generation_worker.acknowledge import Acknowledger
from openai_api.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny-chat"
TOKENIZER = Tokenizer.load(str(TINY))


def make_app(
    engine: FakeEngine, role: str = "aggregated", *, acks: httpx.AsyncBaseTransport | None = None, **options: Any
) -> Starlette:
    worker = Worker(engine, TOKENIZER, WorkerOptions(role, "tiny", aliases=("tiny-chat",), **options))
    if role == "context":
        return context_worker.app.create_app(worker)
    return generation_worker.app.create_app(worker, Acknowledger(acks))


@contextlib.asynccontextmanager
async def client_of(app: Starlette) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client without sockets; the application's lifespan is open."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://w") as client:
        yield client


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncGenerator[tuple[str, int], None]:
    """(host, port) of a real server."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, ws="none", http="httptools", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    try:
        await until(lambda: server.started or task.done())
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        await task


async def until(check: Any, limit: float = 5.0) -> None:
    """Polls; AssertionError after `limit` seconds."""
    deadline = asyncio.get_running_loop().time() + limit
    while not check():
        assert asyncio.get_running_loop().time() < deadline, "not in time"
        await asyncio.sleep(0.005)


def sse(text: str) -> list[Any]:
    """Data of each event, decoded but for [DONE]."""
    events = []
    for block in text.split("\n\n"):
        if not block:
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def check_grammar(events: list[Any], chat: bool, n: int = 1) -> list[dict[str, Any]]:
    """Asserts OpenAI's chunk grammar; returns text, finish_reason, tokens by choice."""
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    for field in ("id", "created", "model", "object"):
        assert len({chunk[field] for chunk in chunks}) == 1, field
    choices: list[dict[str, Any]] = [{"text": "", "finish_reason": None, "logprobs": [], "chunks": 0} for _ in range(n)]
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "a chunk after the finish reason"
            text = part["delta"].get("content", "") if chat else part["text"]
            if chat:
                assert ("role" in part["delta"]) == (choice["chunks"] == 0), "role once, first"
            choice["chunks"] += 1
            choice["text"] += text
            logprobs = part["logprobs"]
            if logprobs:
                choice["logprobs"] += logprobs["content"] if chat else logprobs["tokens"]
            assert part["finish_reason"] in (None, "stop", "length")
            choice["finish_reason"] = part["finish_reason"]
    assert all(choice["finish_reason"] for choice in choices)
    return choices


def completion(prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 64, "temperature": 0} | fields


def chat(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "max_tokens": 64, "temperature": 0} | fields
