"""This worker's KV events and hand-off leases, copied to Redis for as long as the worker serves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from engine.client import EngineClient
from kvstore.handoff import Handle
from kvstore.registry.kv_plane import KvPlaneWriter, Lease

_REDIS = ("redis://", "rediss://", "unix://")


def is_kept_in(cluster_uri: str) -> bool:
    """Whether this kind of registry has a KV plane."""
    return cluster_uri.startswith(_REDIS)


class KvPlane:
    """`publishing()` around the time of serving. `ttl`: seconds that the copy outlives a worker that died;
    `lease_time`: seconds after which pages are free without anybody's word."""

    def __init__(
        self, engine: EngineClient, url: str, cluster: str, worker_id: str, *, ttl: float, lease_time: float
    ) -> None:
        self._engine = engine
        self._target = (url, cluster, worker_id)
        self._ttl = ttl
        self._lease_time = lease_time
        self._writer: KvPlaneWriter | None = None
        self._again = asyncio.Event()

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        incarnation = self._engine.ready.incarnation

        def resnapshot() -> None:
            loop.call_soon_threadsafe(self._again.set)

        writer = self._writer = KvPlaneWriter(*self._target, incarnation, self._ttl, resnapshot)
        self._engine.on_lease_opened, self._engine.on_lease_closed = self._opened, writer.lease_closed
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._publish(writer))
                try:
                    yield
                finally:
                    task.cancel()
        finally:
            self._engine.on_lease_opened = self._engine.on_lease_closed = None
            await asyncio.to_thread(writer.close)

    async def _publish(self, writer: KvPlaneWriter) -> None:
        """A new subscription begins with a snapshot."""
        while True:
            self._again.clear()
            relay = asyncio.create_task(self._relay(writer))
            again = asyncio.create_task(self._again.wait())
            try:
                await asyncio.wait((relay, again), return_when=asyncio.FIRST_COMPLETED)
                if relay.done():
                    relay.result()
                    return  # the engine has ended
            finally:
                for task in (relay, again):
                    task.cancel()
                await asyncio.gather(relay, again, return_exceptions=True)

    async def _relay(self, writer: KvPlaneWriter) -> None:
        async for event in self._engine.subscribe_events():
            writer.publish([event])

    def _opened(self, handle: Handle) -> None:
        assert self._writer is not None
        until = time.time() + self._lease_time
        self._writer.lease_opened(handle.handoff_id, Lease(handle.endpoint, len(handle.block_ids), until))
