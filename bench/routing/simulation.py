"""Simulated context workers on a virtual clock: they prefill one prompt after another, with the engine's own cache."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.blocks import BlockPool
from kvstore.protocol import KvEvent

BLOCK_TOKENS = 512
Done = Callable[[int], None]
"""Is told how many of the prompt's tokens were cached."""


@dataclass(frozen=True)
class Request:
    arrival: float  # seconds
    tokens: int
    keys: list[bytes]  # of its full blocks


@dataclass(frozen=True)
class Setting:
    workers: int = 8
    blocks: int = 2000  # of each worker's cache
    rate: float = 8000.0  # tokens a second that a worker prefills
    overhead: float = 0.02  # seconds a prompt
    slack: float = 2.0
    event_delay: float = 0.01
    tokens_per_block: int = 32  # of the workers that the policies' weights are meant for

    def prefill_seconds(self, tokens: int, cached: int) -> float:
        return self.overhead + (tokens - cached) / self.rate


@dataclass
class Outcome:
    offered: int = 0
    good: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waits: list[float] = field(default_factory=list)  # seconds to the first token
    of_worker: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        waits = sorted(self.waits)
        return {
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "goodput": self.good / max(1, self.offered),
            "ttft_p50": waits[len(waits) // 2],
            "ttft_p99": waits[int(0.99 * (len(waits) - 1))],
            "ttft_max": waits[-1],
            "most_requests": max(self.of_worker, default=0) / (self.offered / max(1, len(self.of_worker))),
        }


def read_trace(path: Path, speed: float = 1.0, limit: int | None = None) -> list[Request]:
    """In order of arrival. `speed` plays it that much faster."""
    requests = []
    with path.open() as lines:
        for line in itertools.islice(lines, limit):
            entry = json.loads(line)
            full = entry["hash_ids"][: entry["input_length"] // BLOCK_TOKENS]
            keys = [number.to_bytes(16, "big") for number in full]
            requests.append(Request(entry["timestamp"] / 1000 / speed, entry["input_length"], keys))
    return sorted(requests, key=lambda request: request.arrival)


# ---------------------------------------------------------------- the simulated workers


class Cache:
    """A worker's prefix cache as its engine keeps it."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)

    def cached_tokens(self, request: Request) -> int:
        """At most all but one: a prompt's last token is always computed."""
        return min(len(self.pool.match(request.keys)) * BLOCK_TOKENS, request.tokens - 1)

    def start(self, request: Request) -> tuple[int, list[int]]:
        """(cached tokens, the request's blocks). A request that is too large for the free blocks bypasses the cache."""
        pool = self.pool
        found = pool.match(request.keys)
        cached = min(len(found) * BLOCK_TOKENS, request.tokens - 1)
        missing = math.ceil(request.tokens / BLOCK_TOKENS) - len(found)
        blocks = pool.claim(request.keys[: len(found)], found)
        if pool.can_reserve(missing):
            pool.reserve(missing)
            blocks += pool.allocate(missing)
        return cached, blocks

    def finish(self, request: Request, blocks: list[int]) -> list[KvEvent]:
        for block, key in zip(blocks, request.keys, strict=False):
            self.pool.register(block, key)
        self.pool.release(blocks)
        return self.pool.drain_events()


class SimWorker:
    """One prompt after another, in order of arrival."""

    def __init__(self, place: int, cache: Cache) -> None:
        self.place = place
        self.cache = cache
        self.queue: deque[tuple[Request, Done]] = deque()
        self.busy_until: float | None = None


class Placement(Protocol):
    """Where a request goes, and what the placement is told of its fate."""

    def place(self, request: Request) -> tuple[int, Done]:
        """(worker, what to call when its prefill is done)."""
        ...

    def changed(self, place: int, events: list[KvEvent]) -> None: ...


class Simulation:
    """`shared` queue: every worker takes the oldest request, wherever it was placed."""

    def __init__(self, setting: Setting, workers: list[SimWorker], shared: bool = False) -> None:
        self.setting = setting
        self.workers = workers
        self.outcome = Outcome(of_worker=[0] * len(workers))
        self.now = 0.0
        self._shared: deque[tuple[Request, Done]] | None = deque() if shared else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self, requests: Sequence[Request], placement: Placement) -> Outcome:
        self.placement = placement
        for request in requests:
            self.at(request.arrival, lambda request=request: self._arrive(request))
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.outcome

    def _arrive(self, request: Request) -> None:
        place, done = self.placement.place(request)
        self.outcome.offered += 1
        self.outcome.prompt_tokens += request.tokens
        if self._shared is not None:
            self._shared.append((request, done))
            for worker in self.workers:
                self._start_next(worker)
            return
        self.outcome.of_worker[place] += 1
        worker = self.workers[place]
        worker.queue.append((request, done))
        self._start_next(worker)

    def _start_next(self, worker: SimWorker) -> None:
        queue = worker.queue if self._shared is None else self._shared
        if worker.busy_until is not None or not queue:
            return
        request, done = queue.popleft()
        cached, blocks = worker.cache.start(request)
        self.outcome.cached_tokens += cached
        worker.busy_until = self.now + self.setting.prefill_seconds(request.tokens, cached)
        self.at(worker.busy_until, lambda: self._finish(worker, request, blocks, lambda: done(cached)))

    def _finish(self, worker: SimWorker, request: Request, blocks: list[int], done: Callable[[], None]) -> None:
        worker.busy_until = None
        wait = self.now - request.arrival
        self.outcome.waits.append(wait)
        self.outcome.good += wait <= self.setting.slack + self.setting.prefill_seconds(request.tokens, 0)
        events = worker.cache.finish(request, blocks)
        if events:
            self.at(self.now + self.setting.event_delay, lambda: self.placement.changed(worker.place, events))
        done()
        self._start_next(worker)
