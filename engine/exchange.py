"""Blocks in and out of this engine: which to fetch for a request, what becomes of them, and which to publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from engine.config import EngineConfig
from engine.delays import Delays
from engine.messages import FromEngine, HandoffFetched, Stats
from engine.offers import Pages
from engine.scheduler import Scheduler
from engine.sequence import Phase, Request
from engine.transfers import Fetcher, FetchJob, FetchJobs, Publisher
from kvstore.handoff import Handle, Handoff, HandoffState, HandoffTable
from kvstore.transceivers.base import BlockStore, Transceiver, Unsettled

_BACKLOG_SHARE = 2  # at most 1/2 of all blocks may be pinned by puts that a slow store has not taken yet


class PutDone:
    """From the publisher thread to the loop."""

    def __init__(self, blocks: list[int], stored: int) -> None:
        self.blocks = blocks
        self.stored = stored


class Settled:
    """From a transceiver's thread: a read that was given up can no longer write to these blocks."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks


class Exchange:
    """Owns the transfer threads. Everything but the threads' own work runs on the loop, which gets `FetchJob` and
    `PutDone` back through `post` and gives them to `fetched` and `put_done`."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        pages: Pages,
        store: BlockStore | None,
        stats: Stats,
        delays: Delays,
        post: Callable[[FetchJob | PutDone | Settled], None],
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
        transceivers: Mapping[str, Transceiver] | None = None,
        fetcher: FetchJobs | None = None,
    ) -> None:
        role = config.pool.role if config.pool else "capacity"
        timeout = config.pool.get_timeout if config.pool else 0.0
        self.puts = store is not None and role in ("both", "producer")
        self._config = config
        self._scheduler = scheduler
        self._store = store if role in ("both", "consumer") else None
        self._stats = stats
        self._send = send
        self._clock = clock
        self._imports: HandoffTable[str] = HandoffTable("", config.handoff_timeout, self._import_ended, clock)
        self._handles: dict[str, tuple[Handle, bool]] = {}  # of open imports; whether its blocks have arrived
        self._block_bytes = pages.block_bytes
        self._backlog = 0
        self._post = post
        if fetcher is None:
            fetcher = Fetcher(config.transfers, pages.block, self._store, timeout, delays, post, transceivers)
            if config.max_tokens_in_buffer is not None:
                fetcher.max_batch = max(1, config.max_tokens_in_buffer // config.tokens_per_block)
        self._fetcher = fetcher
        self._publisher: Publisher | None = None
        if store is not None and config.pool is not None and self.puts:
            self._publisher = Publisher(
                store,
                pages.block,
                config.pool.transfer_batch_size,
                timeout,
                delays,
                lambda blocks, stored: post(PutDone(blocks, stored)),
            )

    def close(self, timeout: float) -> None:
        for request in list(self._scheduler.fetching):
            self.abort(request)
        self._fetcher.close(timeout)
        if self._publisher is not None:
            self._publisher.close(timeout)

    # ------------------------------------------------------------ fetching

    def accept(self, request: Request) -> None:
        """A generation-only request was opened; from here on its source is told exactly once when it may let go."""
        if request.handle is not None:
            self._handles[request.id] = (request.handle, False)
            self._imports.offer(request.id, ())

    def begin(self, request: Request) -> bool:
        """Start fetching what the own prefix cache lacks of an admitted request; False if it is to start at once."""
        capacity = self._scheduler.capacity
        prompt = request.choices[0]
        first = len(prompt.table)
        if request.handle is not None:
            wanted = capacity.blocks(len(request.prompt_ids)) - first
            if not wanted or not self._imports.begin_fetch(request.id):
                self.through(request, ok=not wanted)
                return False
        else:
            wanted = (len(request.prompt_ids) - 1) // capacity.block_size - first
            if wanted < 1 or request.scores_prompt or self._store is None or self._store.state() != "up":
                return False
        blocks = self._scheduler.fetch(request, wanted)
        self._scheduler.blocks.pin(blocks)
        self._start_fetch(request, blocks, first)
        return True

    def fetch_rest(self, request: Request, blocks: list[int], first: int) -> None:
        """As `begin`, for an accepted request whose blocks are allocated and pinned."""
        self._imports.begin_fetch(request.id)
        self._start_fetch(request, blocks, first)

    def _start_fetch(self, request: Request, blocks: list[int], first: int) -> None:
        request.fetch = FetchJob(
            request_id=request.id,
            blocks=blocks,
            keys=request.prompt_keys[first : first + len(blocks)],
            first=first,
            deadline=time.monotonic() + self._config.fetch_timeout,
            handle=request.handle,
        )
        self._fetcher.start(request.fetch)

    def run(self, job: FetchJob) -> None:
        """A job of another owner, who gets it back from the loop."""
        self._fetcher.start(job)

    def cancel(self, job: FetchJob) -> None:
        self._fetcher.cancel(job)

    def fetched(self, job: FetchJob, request: Request | None) -> int:
        """The job is over; returns the prompt tokens that it brought. `request` is None if it was aborted meanwhile."""
        if job.unsettled is not None:
            self.quarantine(job.blocks, job.unsettled)
        self._scheduler.blocks.unpin(job.blocks)
        if job.handle is not None and job.request_id in self._handles:
            self._handles[job.request_id] = (job.handle, job.satisfied)
            self._imports.acknowledge(job.request_id)
        self.count(job)
        if request is None:
            return 0
        block_size = self._scheduler.capacity.block_size
        tokens = min(job.loaded * block_size, len(request.prompt_ids) - job.first * block_size)
        self._stats.fetch_blocks += job.loaded
        self._stats.fetch_bytes += job.loaded * self._block_bytes
        self._note_timing(job, request)
        self._stats.prompt_tokens_pool += job.by_path["pool"] * block_size
        self._stats.prompt_tokens_remote += tokens - job.by_path["pool"] * block_size
        return tokens

    def count(self, job: FetchJob) -> None:
        """Failures, and what a job of another owner brought."""
        for cause in job.failures:
            self.note_failure(cause)
        if job.ahead:
            self._stats.fetch_blocks += job.loaded
            self._stats.fetch_bytes += job.loaded * self._block_bytes
            size = self._scheduler.capacity.block_size
            self._stats.prompt_tokens_pool += job.by_path["pool"] * size
            self._stats.prompt_tokens_remote += (job.loaded - job.by_path["pool"]) * size

    def note_failure(self, cause: str) -> None:
        self._stats.fetch_failures[cause] = self._stats.fetch_failures.get(cause, 0) + 1

    def quarantine(self, blocks: list[int], unsettled: Unsettled) -> None:
        self._scheduler.blocks.pin(blocks)
        self._stats.blocks_quarantined += len(blocks)
        unsettled.then(lambda: self._post(Settled(blocks)))

    def settled(self, item: Settled) -> None:
        self._stats.blocks_quarantined -= len(item.blocks)
        self._scheduler.blocks.unpin(item.blocks)

    def _note_timing(self, job: FetchJob, request: Request) -> None:
        timing = request.timing
        timing.fetched = self._clock() - request.arrival
        timing.fetch_path = job.path
        timing.fetched_blocks = job.loaded
        timing.fetch_bytes = job.loaded * self._block_bytes

    def abort(self, request: Request) -> None:
        """The request is over before its fetch has ended, if it has one at all."""
        if request.fetch is not None and request.phase is Phase.FETCHING:
            self._fetcher.cancel(request.fetch)
        elif request.id in self._imports:
            self._imports.release(request.id)

    def expire(self) -> None:
        """Imports that have waited for so long that their source has let go."""
        self._imports.expire()

    def next_deadline(self) -> float | None:
        return self._imports.next_deadline()

    def through(self, request: Request, ok: bool) -> None:
        if request.handle is not None and request.id in self._handles:
            self._handles[request.id] = (request.handle, ok)
            self._imports.acknowledge(request.id)

    def _import_ended(self, handoff: Handoff[str]) -> None:
        handle, ok = self._handles.pop(handoff.key)
        self._send(
            HandoffFetched(
                request_id=handoff.key,
                handoff_id=handle.handoff_id,
                incarnation=handle.incarnation,
                endpoint=handle.endpoint,
                ok=ok and handoff.state is HandoffState.DONE,
            )
        )

    # ------------------------------------------------------------ publishing

    def publish(self, found: Sequence[tuple[bytes, int]]) -> None:
        """Put blocks that have become findable here where others find them too, if this worker does so."""
        if self._publisher is None:
            return
        for key, block in found:
            if self._backlog >= max(1, self._scheduler.blocks.num_blocks // _BACKLOG_SHARE):
                self._stats.pool_put_failures += 1
                continue
            self._backlog += 1
            self._scheduler.blocks.pin([block])
            self._publisher.put(key, block)

    def put_done(self, done: PutDone) -> None:
        self._backlog -= len(done.blocks)
        self._scheduler.blocks.unpin(done.blocks)
        self._stats.pool_put_blocks += done.stored
        self._stats.pool_put_failures += len(done.blocks) - done.stored
