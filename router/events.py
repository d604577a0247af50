"""Reads one worker's KV events into the index, for as long as the worker is in the table.

Each connection opens with a snapshot. A gap or another incarnation ends the connection; the next one starts afresh.
"""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec

from kvstore.protocol import KV_EVENTS_PATH, KvEventBatch
from router.cluster import Cluster
from router.index import SequenceGap, StaleBatch
from router.worker import Worker

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between connections
_BATCH = msgspec.json.Decoder(KvEventBatch)
_TIMEOUT = httpx.Timeout(5.0, read=None)  # a worker whose cache does not change is silent


class NoEvents(Exception):
    """The worker offers none."""


async def follow_events(cluster: Cluster, worker: Worker, client: httpx.AsyncClient) -> None:
    """Runs until cancelled. `worker.events_state` says "live", or why not."""
    pause = _FIRST_PAUSE
    while True:
        while worker.blocks is None:
            worker.events_state = "the worker tells no incarnation" if worker.usable else "off"
            await asyncio.sleep(_FIRST_PAUSE)
        try:
            await _read_stream(cluster, worker, client)
            problem = "the worker ended the stream"
        except (httpx.HTTPError, SequenceGap, StaleBatch, NoEvents, msgspec.MsgspecError) as error:
            problem = f"{type(error).__name__}: {error}" if not isinstance(error, NoEvents) else str(error)
        if worker.events_state == "live":
            pause = _FIRST_PAUSE
        if worker.events_state != problem and worker.usable:
            logger.warning("%s worker %s: no KV events: %s", worker.role_name, worker.address, problem)
        worker.events_state = problem
        worker.probe_now.set()  # a restart ends the stream first
        if worker.blocks is not None:
            cluster.index.restart(worker.blocks)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _read_stream(cluster: Cluster, worker: Worker, client: httpx.AsyncClient) -> None:
    async with client.stream("GET", worker.url + KV_EVENTS_PATH, timeout=_TIMEOUT) as response:
        if response.status_code != 200:
            raise NoEvents(f"GET {KV_EVENTS_PATH} answers {response.status_code}")
        blocks = worker.blocks
        if blocks is None:
            raise NoEvents("the worker is gone")
        cluster.index.restart(blocks)
        async for line in response.aiter_lines():
            if not line:
                continue
            batch = _BATCH.decode(line)
            cluster.index.apply(blocks, batch)
            if worker.events_state != "live":
                logger.info("%s worker %s: KV events are live", worker.role_name, worker.address)
                worker.events_state = "live"
