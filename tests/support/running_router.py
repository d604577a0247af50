"""The real router on a real socket, inside the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
from fake_worker import FakeWorker

from router.app import Router, RouterOptions
from router.config import DisaggConfig, parse_config
from router.server import make_server


class RunningRouter:
    def __init__(self, router: Router, port: int, client: httpx.AsyncClient) -> None:
        self.router = router
        self.port = port
        self.client = client

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "fake", **body})

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, read to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    @property
    def in_flight(self) -> int:
        return sum(worker.active for worker in self.router.cluster.workers)


def static_config(
    contexts: Sequence[FakeWorker], generations: Sequence[FakeWorker], router: dict[str, Any] | None = None, **keys: Any
) -> DisaggConfig:
    """`router`: the map of that name in both server blocks."""
    both = {} if router is None else {"router": router}
    return parse_config(
        {
            "context_servers": _block(contexts) | both,
            "generation_servers": _block(generations) | both,
            **keys,
        }
    )


def _block(workers: Sequence[FakeWorker]) -> dict[str, Any]:
    return {"num_instances": len(workers), "urls": [worker.address for worker in workers]}


@contextlib.asynccontextmanager
async def running_router(
    config: DisaggConfig, *, wait_ready: bool = True, **options: Any
) -> AsyncIterator[RunningRouter]:
    router = Router(config, RouterOptions(**options))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    started = asyncio.Event()
    async with router.running(), asyncio.TaskGroup() as group:
        server = make_server(router, started.set, owns_process=False)
        group.create_task(server.serve([listener]))
        await started.wait()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=15) as client:
                running = RunningRouter(router, port, client)
                if wait_ready:
                    await eventually(lambda: router.cluster.ready)
                yield running
        finally:
            server.should_exit = True


async def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Returns once `condition()` is true; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)


async def eventually_async(condition: Callable[[], Awaitable[bool]], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.02)


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event; "[DONE]" stays text."""
    payloads = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
