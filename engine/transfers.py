"""Fetching KV blocks from elsewhere, on threads of its own: from another worker's pool, then from the block store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.delays import Delays
from kvstore.errors import StaleBlock, TransferError
from kvstore.handoff import Handle
from kvstore.transceivers.base import BlockStore, Transceiver, Unsettled
from kvstore.transceivers.shm import ShmTransceiver

log = logging.getLogger(__name__)

_LOOKUP_SHARE = 0.5  # of the time for the pool, at most, goes to asking what is there
_PUT_SETTLE = 0.5  # seconds to wait for blocks that the context worker is still putting
_PUT_POLL = 0.01


@dataclasses.dataclass(eq=False)
class FetchJob:
    """Blocks of one prompt, wanted from elsewhere. Until the job is handed back, its blocks belong to it.

    The thread that runs it writes `loaded`, `by_path` and `failures`; nobody reads them before the end.
    """

    request_id: str
    blocks: list[int]  # destination of consecutive blocks of the prompt
    keys: list[bytes]  # of those blocks; a partial last block has none
    first: int  # index in the prompt of blocks[0]
    deadline: float  # on time.monotonic
    handle: Handle | None = None  # None: looks for a prefix, and a miss is no failure
    ahead: bool = False  # the hand-off is still being made: more is to come (engine.landings)
    cancelled: bool = False
    unsettled: Unsettled | None = None  # a read was given up that may still write to `blocks`
    loaded: int = 0  # leading blocks that hold the right bytes
    by_path: Counter[str] = dataclasses.field(default_factory=Counter)  # blocks
    failures: list[str] = dataclasses.field(default_factory=list)  # causes

    @property
    def complete(self) -> bool:
        return self.loaded == len(self.blocks)

    @property
    def keyed_complete(self) -> bool:
        """All that a store by block key can have."""
        return self.loaded >= len(self.keys)

    @property
    def satisfied(self) -> bool:
        """Nothing failed for good: all is here, or all but a tail that the path used cannot carry."""
        if self.complete or self.cancelled:
            return self.complete
        return self.keyed_complete and (self.by_path["pool"] > 0 or not self.failures)

    @property
    def path(self) -> str | None:
        """Where most came from; "recompute" if a failure left nothing."""
        if self.by_path:
            return self.by_path.most_common(1)[0][0]
        return "recompute" if self.failures or self.handle is not None else None


class FetchJobs(Protocol):
    """Who runs jobs, and hands each of them back."""

    def start(self, job: FetchJob) -> None: ...

    def cancel(self, job: FetchJob) -> None:
        """The job ends early; it is handed back as every other."""

    def close(self, timeout: float) -> None: ...


class Fetcher:
    """`threads` threads that run jobs and give each to `done`, whatever became of it."""

    def __init__(
        self,
        paths: tuple[str, ...],
        block: Callable[[int], memoryview],
        store: BlockStore | None,
        store_timeout: float,
        delays: Delays,
        done: Callable[[FetchJob], None],
        transceivers: Mapping[str, Transceiver] | None = None,
        threads: int = 2,
    ) -> None:
        """`transceivers`: those of `paths` that are there, by name; without any, shared memory."""
        self.max_batch: int | None = None  # blocks of one read; None: what the transceiver takes
        self._paths = paths
        self._transceivers = {"shm": ShmTransceiver(block)} if transceivers is None else transceivers
        self._block = block
        self._store = store
        self._store_timeout = store_timeout
        self._delays = delays
        self._done = done
        self._jobs: queue.SimpleQueue[FetchJob | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"fetch-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, job: FetchJob) -> None:
        self._jobs.put(job)

    def cancel(self, job: FetchJob) -> None:
        """The job ends early, at its next look; it is handed back as every other."""
        job.cancelled = True
        self._delays.wake()

    def close(self, timeout: float) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        limit = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        for transceiver in self._transceivers.values():
            transceiver.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._fetch(job)
            except Exception:  # a thread that dies here would leave its request waiting for ever
                log.exception("fetch of %s", job.request_id)
                job.failures.append("internal")
            self._done(job)

    def _fetch(self, job: FetchJob) -> None:
        self._delays.wait("fetch", lambda: job.cancelled)
        if job.handle is None:
            self._look_up(job)
            return
        usable = False
        for path in self._paths:
            if self._over(job) or job.complete or job.unsettled:
                return
            if path == "pool":
                if job.handle.pool and self._store is not None:
                    usable = True
                    if not job.keyed_complete:
                        self._from_store(job, self._store)
            elif (transceiver := self._transceivers.get(path)) is not None and transceiver.reaches(job.handle):
                usable = True
                self._from_worker(job, job.handle, transceiver)
        if not usable:
            job.failures.append("no_path")

    def _over(self, job: FetchJob) -> bool:
        if job.cancelled:
            return True
        if time.monotonic() >= job.deadline:
            if "timeout" not in job.failures:
                job.failures.append("timeout")
            return True
        return False

    def _from_worker(self, job: FetchJob, handle: Handle, transceiver: Transceiver) -> None:
        ids = handle.block_ids[job.first : job.first + len(job.blocks)]
        generations = handle.generations[job.first : job.first + len(job.blocks)]
        batch = min(transceiver.batch, self.max_batch or transceiver.batch)
        try:
            for start in range(job.loaded, len(job.blocks), batch):
                if self._over(job):
                    return
                part = slice(start, min(start + batch, len(job.blocks)))
                transceiver.fetch(handle, ids[part], generations[part], job.blocks[part], lambda: self._over(job))
                job.by_path[transceiver.name] += part.stop - start
                job.loaded = part.stop
        except Unsettled as error:
            job.unsettled = error
            log.warning("hand-off %d: %s; its pages stay out of use until it does", handle.handoff_id, error)
        except StaleBlock as error:
            job.failures.append("stale")
            log.warning("hand-off %d: %s", handle.handoff_id, error)
        except TransferError as error:
            job.failures.append(transceiver.name)
            log.warning("hand-off %d by %s: %s", handle.handoff_id, transceiver.name, error)

    def _from_store(self, job: FetchJob, store: BlockStore) -> None:
        """Blocks that a context worker has put, or is putting: a block not there yet is asked for again for a while."""
        start = time.monotonic()
        limit = min(job.deadline, start + self._store_timeout)
        while not job.cancelled:
            self._get(job, store, len(job.keys), limit - time.monotonic())
            if job.keyed_complete:
                return
            if time.monotonic() > min(limit, start + _PUT_SETTLE) or store.state() != "up":
                break
            time.sleep(_PUT_POLL)
        job.failures.append("pool_miss" if store.state() == "up" else "pool_down")

    def _look_up(self, job: FetchJob) -> None:
        if self._store is None or job.cancelled:
            return
        budget = min(job.deadline - time.monotonic(), self._store_timeout)
        start = time.monotonic()
        there = self._store.contains(job.keys, budget * _LOOKUP_SHARE)
        if there and not job.cancelled:
            self._get(job, self._store, min(there, len(job.keys)), budget - (time.monotonic() - start))
        if job.loaded < there:
            job.failures.append("pool_short")
        elif self._store.state() != "up":
            job.failures.append("pool_down")

    def _get(self, job: FetchJob, store: BlockStore, until: int, timeout: float) -> None:
        keys = job.keys[job.loaded : until]
        if not keys or timeout <= 0:
            return
        into = [self._block(block) for block in job.blocks[job.loaded : until]]
        loaded = max(0, min(store.get(keys, into, timeout), len(keys)))
        if loaded:
            job.by_path["pool"] += loaded
            job.loaded += loaded


class Publisher:
    """One thread that puts blocks into the store and gives them to `done(blocks, stored)`, stored or not."""

    def __init__(
        self,
        store: BlockStore,
        block: Callable[[int], memoryview],
        batch_size: int,
        timeout: float,
        delays: Delays,
        done: Callable[[list[int], int], None],
    ) -> None:
        self._store = store
        self._block = block
        self._batch_size = batch_size
        self._timeout = timeout
        self._delays = delays
        self._done = done
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="publish", daemon=True)
        self._thread.start()

    def put(self, key: bytes, block: int) -> None:
        self._queue.put((key, block))

    def close(self, timeout: float) -> None:
        """Puts that have not begun are given up."""
        self._closed = True
        self._delays.wake()
        self._queue.put(None)
        self._thread.join(timeout)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item]
            with contextlib.suppress(queue.Empty):
                while len(batch) < self._batch_size and (more := self._queue.get_nowait()) is not None:
                    batch.append(more)
            self._delays.wait("publish", lambda: self._closed)
            stored = 0 if self._closed else self._store_batch(batch)
            self._done([block for _, block in batch], stored)
            if self._closed:
                return

    def _store_batch(self, batch: list[tuple[bytes, int]]) -> int:
        try:
            return self._store.put([key for key, _ in batch], [self._block(block) for _, block in batch], self._timeout)
        except Exception:  # a thread that dies here would keep its blocks pinned for ever
            log.exception("put of %d blocks", len(batch))
            return 0
