"""Statistics of single steps (GET /metrics) and of single requests (GET /perf_metrics), in TensorRT-LLM's format.

Nothing is collected unless it is asked for: with both off, the loop pays a few calls that return at once.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import msgspec

from engine.batch import Batch
from engine.cache_events import CacheEventLog
from engine.config import EngineConfig
from engine.messages import Feed, Stats
from engine.scheduler import Scheduler
from engine.sequence import Request

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Statistics:
    """What the loop calls; each call is about something that has just happened."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        stats: Stats,
        window: int,
        gpu_memory: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """`window`: the longest sequence, tokens. `gpu_memory` tells the device bytes in use."""
        self._stats = stats
        self._iterations: IterationLog | None = None
        self._requests: RequestLog | None = None
        self._events: CacheEventLog | None = None
        if config.enable_iter_perf_stats:
            self._iterations = IterationLog(scheduler, config.iter_perf_stats_interval, gpu_memory, clock)
        if config.return_perf_metrics:
            self._requests = RequestLog(scheduler.capacity.block_size, clock)
        blocks = scheduler.blocks
        if config.event_buffer_max_size and blocks.reuse:
            levels = (blocks.num_blocks, blocks.host.num_blocks if blocks.host is not None else 0)
            self._events = CacheEventLog(config.event_buffer_max_size, window, levels)
            blocks.report_to(self._events)

    def admitted(self, request: Request) -> None:
        if self._iterations is not None:
            self._iterations.admitted(request)

    def step_begins(self) -> None:
        if self._iterations is not None:
            self._iterations.begin()

    def step_ended(self) -> None:
        if self._iterations is not None:
            self._iterations.end(self._stats.steps)

    def first_token(self, request: Request) -> None:
        if self._requests is not None:
            self._requests.first_token(request, self._stats)

    def ended(self, request: Request) -> None:
        if self._iterations is not None:
            self._iterations.ended()
        if self._requests is not None:
            self._requests.ended(request, self._stats)

    def take(self) -> list[Feed]:
        """What has come up since the last call."""
        logs = {"iterations": self._iterations, "requests": self._requests, "cache_events": self._events}
        taken = [Feed(name, log.take()) for name, log in logs.items() if log is not None]
        return [feed for feed in taken if feed.items]


class IterationLog:
    """One record every `interval` steps, kept until they are taken."""

    def __init__(
        self, scheduler: Scheduler, interval: int, gpu_memory: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._gpu_memory = gpu_memory
        self._clock = clock
        self._began = 0.0
        self._records: list[bytes] = []
        self._new = self._completed = 0
        self._queue_ms = 0.0
        self._allocated = self._reused = self._missed = 0

    def admitted(self, request: Request) -> None:
        self._new += 1
        self._queue_ms += request.timing.scheduled * 1000

    def ended(self) -> None:
        self._completed += 1

    def begin(self) -> None:
        self._began = self._clock()

    def end(self, step: int) -> None:
        """To be called when step number `step` is over; its work is the scheduler's batch."""
        if step % self._interval:
            return
        self._records.append(msgspec.json.encode(self._record(step)))
        self._new = self._completed = 0
        self._queue_ms = 0.0

    def take(self) -> list[bytes]:
        """Each as JSON."""
        records, self._records = self._records, []
        return records

    def _record(self, step: int) -> dict[str, Any]:
        scheduler = self._scheduler
        active = scheduler.requests_running + len(scheduler.fetching) + scheduler.requests_paused
        return {
            "timestamp": datetime.datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iter": step,
            "iterLatencyMS": (self._clock() - self._began) * 1000,
            "newActiveRequestsQueueLatencyMS": self._queue_ms,
            "numNewActiveRequests": self._new,
            "numActiveRequests": active,
            "numQueuedRequests": len(scheduler.waiting),
            "numCompletedRequests": self._completed,
            "maxNumActiveRequests": scheduler.capacity.max_batch_size,
            "maxBatchSizeStatic": scheduler.capacity.max_batch_size,
            "maxBatchSizeRuntime": scheduler.capacity.max_batch_size,
            "maxNumTokensRuntime": scheduler.max_num_tokens,
            "gpuMemUsage": self._gpu_memory(),
            "cpuMemUsage": _resident_bytes(),
            "pinnedMemUsage": 0,
            "kvCacheStats": self._cache(),
            "inflightBatchingStats": _batch_stats(scheduler.batch, scheduler.requests_paused),
        }

    def _cache(self) -> dict[str, Any]:
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        seen = scheduler.reused_blocks + scheduler.missed_blocks
        free = blocks.free + blocks.reusable
        changes = (
            blocks.allocated - self._allocated,
            scheduler.reused_blocks - self._reused,
            scheduler.missed_blocks - self._missed,
        )
        self._allocated, self._reused, self._missed = blocks.allocated, scheduler.reused_blocks, scheduler.missed_blocks
        return {
            "maxNumBlocks": blocks.num_blocks,
            "freeNumBlocks": free,
            "usedNumBlocks": blocks.num_blocks - free,
            "tokensPerBlock": scheduler.capacity.block_size,
            "allocTotalBlocks": blocks.allocated,
            "allocNewBlocks": blocks.allocated,
            "reusedBlocks": scheduler.reused_blocks,
            "missedBlocks": scheduler.missed_blocks,
            "cacheHitRate": scheduler.reused_blocks / seen if seen else 0.0,
            "iterAllocBlocks": changes[0],
            "iterReusedBlocks": changes[1],
            "iterMissedBlocks": changes[2],
        }


def _batch_stats(batch: Batch, paused: int) -> dict[str, Any]:
    context: set[int] = set()
    generating: set[int] = set()
    tokens = drawn = 0
    for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
        if chunk.start < len(choice.request.prompt_ids):
            context.add(id(choice.request))
            tokens += len(chunk.tokens)
        else:
            generating.add(id(choice.request))
            drawn += 1
    return {
        "numScheduledRequests": len(context | generating),
        "numContextRequests": len(context),
        "numGenRequests": len(generating),
        "numPausedRequests": paused,
        "numCtxTokens": tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": drawn / len(generating) if generating else 0.0,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE


class RequestLog:
    """One record of each request that drew a token. Times are of the clock that a host's processes share."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._first_steps: dict[str, tuple[int, int]] = {}
        self._records: list[bytes] = []

    def first_token(self, request: Request, stats: Stats) -> None:
        reused = len(request.choices[0].keys) if not request.handle else 0
        self._first_steps[request.id] = (stats.steps, min(reused, request.cached_tokens // self._block_size))

    def ended(self, request: Request, stats: Stats) -> None:
        """Aborted ones too, if they got that far."""
        first, reused = self._first_steps.pop(request.id, (-1, 0))
        if first >= 0:
            self._records.append(msgspec.json.encode(self._record(request, stats, first, reused)))

    def take(self) -> list[bytes]:
        """Each as JSON."""
        records, self._records = self._records, []
        return records

    def _record(self, request: Request, stats: Stats, first_step: int, reused: int) -> dict[str, Any]:
        timing = request.timing
        times = {
            "arrival_time": request.arrival,
            "first_scheduled_time": request.arrival + timing.scheduled,
            "first_token_time": request.arrival + timing.first_token,
            "last_token_time": self._clock(),
        }
        if timing.fetched is not None:
            times["kv_cache_size"] = timing.fetch_bytes
            times["kv_cache_transfer_start"] = request.arrival + timing.scheduled
            times["kv_cache_transfer_end"] = request.arrival + timing.fetched
        prompt = -(-len(request.prompt_ids) // self._block_size)
        grown = (-(-(len(choice.tokens) - 1) // self._block_size) for choice in request.choices if choice.generated)
        total = max(prompt, request.shared_blocks + sum(blocks - request.shared_blocks for blocks in grown))
        handoff = request.handle.handoff_id if request.handle else request.handoff_id
        return {
            "request_id": request.id,
            **({"ctx_request_id": handoff} if handoff is not None else {}),
            "perf_metrics": {
                "first_iter": first_step,
                "last_iter": stats.steps,
                "timing_metrics": times,
                "kv_cache_metrics": {
                    "num_total_allocated_blocks": total,
                    "num_new_allocated_blocks": total - reused,
                    "num_reused_blocks": reused,
                    "num_missed_blocks": prompt - reused,
                },
            },
        }
