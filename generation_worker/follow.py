"""The generation side of generation_first over HTTP: follow hand-offs at their context workers for the engine."""

from __future__ import annotations

import asyncio
import logging

import httpx

from context_worker.followed import KEEP_ALIVE_S, decode_line
from engine.messages import Arrival, HandoffWanted
from kvstore.protocol import FOLLOW_PATH
from openai_api.engine_port import Engine

logger = logging.getLogger(__name__)

_SILENCE_S = 10 * KEEP_ALIVE_S  # a context worker that says nothing for so long is taken for dead
_CONNECT_S = 3.0


class Follower:
    """One connection a hand-off that is wanted. Use as an async context manager; its exit ends all of them."""

    def __init__(self, engine: Engine, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._engine = engine
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, trust_env=False)
        self._group = asyncio.TaskGroup()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Follower:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._client.aclose()

    def take(self, message: HandoffWanted) -> None:
        """On the event loop; returns at once."""
        if message.wanted:
            task = self._group.create_task(self._follow(message))
            self._tasks[message.request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.request_id, None))
        elif (running := self._tasks.get(message.request_id)) is not None:
            running.cancel()

    async def _follow(self, wanted: HandoffWanted) -> None:
        url, body = f"http://{wanted.source}{FOLLOW_PATH}", {"disagg_request_id": wanted.handoff_id}
        reason = "it closed the connection"
        try:
            async with self._client.stream("POST", url, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line and self._pass_on(wanted.request_id, line):
                        return
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = str(error) or type(error).__name__
        logger.warning("hand-off %d: the context worker at %s: %s", wanted.handoff_id, wanted.source, reason)
        self._engine.arrive(Arrival(wanted.request_id, error=reason))

    def _pass_on(self, request_id: str, line: str) -> bool:
        """True after the last message."""
        told = decode_line(line)
        self._engine.arrive(
            Arrival(request_id, told.first, told.block_ids, told.generations, told.handle, told.done, told.error)
        )
        return told.done
