"""Helpers of tests that need a registry: waiting with a deadline, and a watcher of a cluster's membership."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import redis

from kvstore.protocol import WorkerRecord
from kvstore.registry import Membership
from kvstore.registry.embedded import EmbeddedValkey


def eventually(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
    """Polls until `condition()` is truthy; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(0.005)


async def eventually_async(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def valkey_client(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    client = redis.Redis(port=valkey.port, decode_responses=True, protocol=2, socket_timeout=5)
    try:
        yield client
    finally:
        client.close()


class Views:
    """What a membership has shown, in order."""

    def __init__(self) -> None:
        self.all: list[list[WorkerRecord]] = []

    @property
    def ids(self) -> list[str] | None:
        """Worker ids of the latest view; None before the first."""
        return [record.worker_id for record in self.all[-1]] if self.all else None


@contextlib.asynccontextmanager
async def watching(membership: Membership) -> AsyncIterator[Views]:
    """Watches in a task of its own; closes the membership at the end."""
    views = Views()

    async def watch() -> None:
        async for records in membership.watch():
            views.all.append(records)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch())
        try:
            yield views
        finally:
            await membership.aclose()
            async with asyncio.timeout(5):
                await asyncio.wait({task})
