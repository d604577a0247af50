"""Least expected time to the first token, in seconds:

    queue + work_weight x (fixed + computed tokens x prefill rate) + fetched tokens x fetch rate
          + recent_weight x recent work

Computing counts for more than its own seconds, since it also delays those who come later; with a weight of 1 caches
are given up for short queues that are found nowhere a moment later.

*Queue* is what is reserved on the worker and not answered yet, less the time that it has been at it. Rates are each
worker's own, learned from its answers (router.pace); a worker that differs little from the fleet is taken at the
fleet's, so that equal workers are judged equal. Tokens that the worker has in host memory, or that the pool has because
another worker computed them, are fetched and not computed.

*Recent work* is what the worker was given in the last decisions, whether or not it is done. It is what spreads traffic
that comes one request at a time, of which the queue knows nothing: a short common prefix does not keep all of it on one
worker, a long one does. It fades by decisions and not by time, so that it means the same at any pace.

A prompt's blocks count as the worker's from the moment it is sent there. Ties go to the least recently used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from router.config import RouterConfig
from router.index import BlockIndex, WorkerBlocks
from router.pace import Pace
from router.policy.base import Need, PrefixAware, matched_blocks
from router.worker import Worker

logger = logging.getLogger(__name__)

RECENT_DECISIONS = 16  # a worker, over which recent work fades
FETCH_SHARE = 0.1  # of the time to compute a token: what fetching one costs, until it is measured
DEFAULT_BLOCK = 32  # tokens
NOTABLE = 1.5  # a worker's rate is its own if it differs from the fleet's by this factor
RESCUE = 30.0  # seconds after which a prediction that no event confirmed is dropped


class _Load:
    """What a worker has to do."""

    __slots__ = ("judged", "open_seconds", "pace", "progress", "recent", "recent_at", "rescued")

    def __init__(self, fleet: Pace) -> None:
        self.pace = Pace()
        self.judged = fleet  # the pace that it is taken at: its own, or the fleet's
        self.open_seconds = 0.0  # expected, of all that is reserved
        self.progress = 0.0  # when it last answered, or got work while idle
        self.recent = 0.0  # seconds of work, fading
        self.recent_at = 0
        self.rescued = 0.0


class _Cost:
    """One request on one worker, in seconds. `picked` is when it was sent."""

    __slots__ = ("cached", "compute", "fetch", "fetched", "picked", "queue", "recent", "total")

    def __init__(self, queue: float, compute: float, fetch: float, recent: float, config: RouterConfig) -> None:
        self.queue, self.compute, self.fetch, self.recent = queue, compute, fetch, recent
        self.total = queue + config.work_weight * compute + fetch + config.recent_weight * recent
        self.cached = self.fetched = 0  # tokens
        self.picked = 0.0


class LeastTime(PrefixAware):
    name = "least_time"

    def __init__(self, config: RouterConfig, index: BlockIndex) -> None:
        super().__init__(index)
        self._config = config
        self._fleet = Pace()
        self._loads: dict[Worker, _Load] = {}
        self._open: dict[tuple[Worker, Need], _Cost] = {}
        self._candidates = 1

    # ------------------------------------------------------------ choosing

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        matched = self._matched(need)
        self._candidates = len(candidates)
        now, size, pooled = time.monotonic(), self._block_size(need), self._pooled(matched)
        best, least, last = candidates[0], math.inf, 0
        for worker in self._shortlist(candidates, matched):
            total = self._total(worker, need, matched, now, size, pooled)
            if total < least - 1e-9 or (total <= least + 1e-9 and worker.last_picked < last):
                best, least, last = worker, min(total, least), worker.last_picked
        self.affinity_decisions += matched_blocks(best, matched) > 0
        return best

    def _total(self, worker: Worker, need: Need, matched: dict[int, int], now: float, size: int, pooled: int) -> float:
        """`_cost(…).total`, quickly: this runs for every candidate."""
        load, blocks = self._loads.get(worker), worker.blocks
        if load is None or pooled or (blocks is not None and blocks.host) or not need.num_tokens:
            return self._cost(worker, need, matched, now, size, pooled).total
        pace, config = load.judged, self._config
        own = matched.get(blocks.slot, 0) if matched and blocks is not None else 0
        tokens = need.num_tokens - own * size
        total = config.work_weight * (pace.fixed + pace.per_token * (tokens if tokens > 1 else 1))
        if worker.active:
            total += self._queue(worker, load, now)
        if load.recent:
            fading = math.exp((load.recent_at - self.decisions) / (RECENT_DECISIONS * self._candidates))
            total += config.recent_weight * load.recent * fading
        return total

    def _cost(self, worker: Worker, need: Need, matched: dict[int, int], now: float, size: int, pooled: int) -> _Cost:
        load = self._load(worker)
        pace = load.judged
        own = matched_blocks(worker, matched)
        fetched = max(0, pooled - own) + self._in_host_memory(worker, need, own)
        cached = own + max(0, pooled - own)
        tokens = max(need.num_tokens - cached * size, min(1, need.num_tokens))
        compute = pace.seconds(tokens) if need.num_tokens else self._usual(pace)
        per_fetched = pace.per_token * FETCH_SHARE if pace.per_fetched_token is None else pace.per_fetched_token
        recent = load.recent and load.recent * self._fading(load)
        queue = self._queue(worker, load, now) if worker.active else 0.0
        cost = _Cost(queue, compute, fetched * size * per_fetched, recent, self._config)
        cost.cached, cost.fetched = cached * size, fetched * size
        return cost

    @staticmethod
    def _queue(worker: Worker, load: _Load, now: float) -> float:
        """The request that is being computed counts as begun when the worker last answered."""
        return load.open_seconds - min(max(0.0, now - load.progress), load.open_seconds / worker.active)

    def _fading(self, load: _Load) -> float:
        return math.exp((load.recent_at - self.decisions) / (RECENT_DECISIONS * self._candidates))

    def _judge(self, load: _Load) -> None:
        own, fleet = load.pace, self._fleet
        ratio = (own.fixed + 1000 * own.per_token) / (fleet.fixed + 1000 * fleet.per_token)
        load.judged = own if own.known and not 1 / NOTABLE < ratio < NOTABLE else fleet

    @staticmethod
    def _usual(pace: Pace) -> float:
        """A prompt of unknown length."""
        return pace.seconds(500)

    def _pooled(self, matched: dict[int, int]) -> int:
        return max(matched.values(), default=0) if self._config.pool else 0

    @staticmethod
    def _in_host_memory(worker: Worker, need: Need, own: int) -> int:
        if worker.blocks is None or not worker.blocks.host:
            return 0
        host = worker.blocks.host
        return sum(key in host for key in need.keys[:own])

    def _block_size(self, need: Need) -> int:
        """Tokens."""
        return need.block_size or self._config.tokens_per_block or DEFAULT_BLOCK

    def _load(self, worker: Worker) -> _Load:
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = _Load(self._fleet)
        return load

    # ------------------------------------------------------------ bookkeeping

    def reserve(self, worker: Worker, need: Need) -> None:
        matched, now = self._matched(need), time.monotonic()
        cost = self._cost(worker, need, matched, now, self._block_size(need), self._pooled(matched))
        load = self._load(worker)
        work = cost.compute + cost.fetch
        if worker.active == 1:  # this request alone
            load.progress, load.open_seconds = now, 0.0
        load.open_seconds += work
        load.recent = load.recent * self._fading(load) + work
        load.recent_at = self.decisions
        cost.picked = now
        self._open[worker, need] = cost
        if self._follows_events(worker):
            assert worker.blocks is not None
            if now - load.rescued > RESCUE:
                load.rescued = now
                self._expire(worker, worker.blocks)
            self._index.predict(worker.blocks, need.keys)

    def _expire(self, worker: Worker, blocks: WorkerBlocks) -> None:
        expired = self._index.expire_predictions(blocks)
        if expired:
            logger.warning(
                "%s worker %s was to make %d KV blocks and told of none of them: is its block reuse on, and do its "
                "blocks have %s tokens?",
                worker.role_name,
                worker.address,
                expired,
                worker.info.tokens_per_block or "as many",
            )

    def _follows_events(self, worker: Worker) -> bool:
        """Only events would also take back what was predicted."""
        return self._config.track_routed_blocks and worker.blocks is not None and worker.blocks.expected is not None

    def served(self, worker: Worker, need: Need, cached_tokens: int | None) -> None:
        cost, load = self._open.get((worker, need)), self._load(worker)
        if cost is None:
            return
        now = time.monotonic()
        seconds = now - max(cost.picked, load.progress)
        load.progress = now
        if need.num_tokens == 0:
            return
        cached = cost.cached if cached_tokens is None else cached_tokens
        computed = max(1, need.num_tokens - cached)
        fetched = min(cost.fetched, cached)
        for pace in (load.pace, self._fleet):
            if fetched:
                pace.observe_fetch(fetched, seconds - pace.seconds(computed))
            else:
                pace.observe(computed, seconds)
        self._judge(load)

    def failed(self, worker: Worker, need: Need) -> None:
        if worker.blocks is not None:
            self._index.withdraw(worker.blocks, need.keys)

    def release(self, worker: Worker, need: Need) -> None:
        super().release(worker, need)
        cost = self._open.pop((worker, need), None)
        if cost is not None:
            load = self._load(worker)
            load.open_seconds = max(0.0, load.open_seconds - cost.compute - cost.fetch)

    def forget(self, worker: Worker) -> None:
        self._loads.pop(worker, None)

    # ------------------------------------------------------------ views

    def scores(self, candidates: Sequence[Worker], need: Need) -> list[dict[str, float]]:
        matched, now = self._matched(need), time.monotonic()
        size, pooled = self._block_size(need), self._pooled(matched)
        self._candidates = max(1, len(candidates))
        found = []
        for worker in candidates:
            cost = self._cost(worker, need, matched, now, size, pooled)
            found.append(
                {
                    "score": -cost.total,
                    "matched_blocks": matched_blocks(worker, matched),
                    "queue_seconds": cost.queue,
                    "compute_seconds": cost.compute,
                    "fetch_seconds": cost.fetch,
                    "recent_work_seconds": cost.recent,
                    "active_requests": worker.active,
                }
            )
        return found

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "prefill_tokens_per_second": 1 / self._fleet.per_token if self._fleet.known else None,
            "expired_predictions": self._index.expired_predictions,
        }
