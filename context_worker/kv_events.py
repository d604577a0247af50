"""GET /kv_events/stream: the worker's prefix cache as JSON lines, a snapshot first, then every change.

An empty batch every few seconds tells a reader, and the connection in between, that the worker lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

from kvstore.errors import ServingError
from kvstore.protocol import KvEvent, KvEventBatch
from openai_api.engine_port import Engine
from openai_api.reply import Reply

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 3.0
_JSON_LINES = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]


class EventStream:
    """One reader. Ends when the reader leaves, the engine dies, or `stopping` is set."""

    def __init__(self, engine: Engine, stopping: asyncio.Event, reply: Reply, keep_alive: float = KEEP_ALIVE_S) -> None:
        self._engine = engine
        self._stopping = stopping
        self._reply = reply
        self._keep_alive = keep_alive
        self._incarnation = engine.ready.incarnation
        self._seq = 0
        self._turn = asyncio.Lock()  # numbers go out in order

    async def run(self) -> None:
        await self._reply.open_stream(content=_JSON_LINES)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._relay(self._engine.subscribe_events())),
                group.create_task(self._keep_alive_forever()),
                group.create_task(_wait(self._stopping)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        await self._reply.close_stream()

    async def _relay(self, events: AsyncIterator[KvEvent]) -> None:
        try:
            async for event in events:
                await self._write([event])
        except ServingError as error:
            logger.warning("KV event stream ends: %s", error.message)

    async def _keep_alive_forever(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive)
            await self._write([])

    async def _write(self, events: list[KvEvent]) -> None:
        async with self._turn:
            batch = KvEventBatch(self._incarnation, self._seq, events)
            self._seq += 1
            await self._reply.write(msgspec.json.encode(batch) + b"\n")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
