"""POST /handoff/follow: a generation worker has made room for a prompt, and is told page by page how it comes along.

A line a message, base64 of a HandoffProgress in msgpack; empty lines keep the connection alive. The reader's leaving
before the last message releases the hand-off: nobody else will read it.
"""

from __future__ import annotations

import asyncio
import base64

import msgspec

from engine.mailbox import Mailbox
from engine.messages import HandoffProgress
from openai_api.engine_port import Engine
from openai_api.reply import Reply

KEEP_ALIVE_S = 1.0
_LINES = [(b"content-type", b"text/plain"), (b"cache-control", b"no-cache")]


def encode_line(message: HandoffProgress) -> bytes:
    return base64.b64encode(msgspec.msgpack.encode(message)) + b"\n"


def decode_line(line: str) -> HandoffProgress:
    """ValueError for anything else."""
    return msgspec.msgpack.decode(base64.b64decode(line, validate=True), type=HandoffProgress)


class FollowedHandoff:
    """One reader. Ends with the last message, when the reader leaves, and when `stopping` is set."""

    def __init__(self, engine: Engine, stopping: asyncio.Event, reply: Reply, keep_alive: float = KEEP_ALIVE_S) -> None:
        self._engine = engine
        self._stopping = stopping
        self._reply = reply
        self._keep_alive = keep_alive
        self._turn = asyncio.Lock()

    async def run(self, handoff_id: int) -> None:
        progress = self._engine.follow_handoff(handoff_id)
        told_all = False
        try:
            await self._reply.open_stream(content=_LINES)
            async with asyncio.TaskGroup() as group:
                relay = group.create_task(self._relay(progress))
                tasks = [relay, group.create_task(self._breathe()), group.create_task(_wait(self._stopping))]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                told_all = relay.done() and not relay.cancelled() and relay.exception() is None and relay.result()
                for task in tasks:
                    task.cancel()
            await self._reply.close_stream()
        finally:
            progress.close()
            if not told_all:
                self._engine.release_handoff(handoff_id)

    async def _relay(self, progress: Mailbox[HandoffProgress]) -> bool:
        """Whether the last message has gone out."""
        async for message in progress:
            await self._write(encode_line(message))
            if message.done:
                return True
        return False

    async def _breathe(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive)
            await self._write(b"\n")

    async def _write(self, line: bytes) -> None:
        async with self._turn:
            await self._reply.write(line)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
