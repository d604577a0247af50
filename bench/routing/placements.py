"""Where a request goes: by a policy of the router, or by one of the references that know more than a router can."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from unittest import mock

from bench.routing.simulation import BLOCK_TOKENS, Cache, Done, Outcome, Request, Setting, Simulation, SimWorker
from kvstore.protocol import KvEvent, KvEventBatch, ServerRole
from router.config import RouterConfig
from router.index import BlockIndex
from router.policy import Need, make_policy
from router.policy.conversation import CHARACTERS_PER_TOKEN
from router.worker import Worker, WorkerState

REFERENCES = ("all_knowing", "oracle")


class RouterPlacement:
    """The router's own policy and index, called as its orchestrator calls them."""

    def __init__(self, kind: str, setting: Setting) -> None:
        self.index = BlockIndex()
        # The trace's blocks count for as many of the workers' blocks, against which load is weighed.
        weight = RouterConfig.load_weight * setting.tokens_per_block / BLOCK_TOKENS
        config = RouterConfig(type=kind, tokens_per_block=BLOCK_TOKENS, load_weight=weight)
        self.policy = make_policy(config, self.index)
        self.workers = [Worker(ServerRole.CONTEXT, "127.0.0.1", 1 + place) for place in range(setting.workers)]
        self._seq = [1] * setting.workers
        for place, worker in enumerate(self.workers):
            worker.state = WorkerState.READY
            worker.blocks = self.index.attach(f"w{place}", worker)
            self.index.apply(worker.blocks, KvEventBatch(f"w{place}", 0, [KvEvent(cleared=True)]))

    def place(self, request: Request) -> tuple[int, Done]:
        need = Need(request.tokens, request.keys, BLOCK_TOKENS)
        if self.policy.needs_text:
            need.text = _text(request)
        worker = self.policy.pick(self.workers, need)

        def done(cached: int) -> None:
            self.policy.served(worker, need, cached)
            self.policy.release(worker, need)

        return self.workers.index(worker), done

    def changed(self, place: int, events: list[KvEvent]) -> None:
        blocks = self.workers[place].blocks
        assert blocks is not None
        self.index.apply(blocks, KvEventBatch(f"w{place}", self._seq[place], events))
        self._seq[place] += 1


class AllKnowing:
    """Least time to the first token, from the workers' true state."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def place(self, request: Request) -> tuple[int, Done]:
        return min(self._simulation.workers, key=lambda worker: self._seconds(worker, request)).place, _nothing

    def _seconds(self, worker: SimWorker, request: Request) -> float:
        setting = self._simulation.setting
        ahead = 0.0 if worker.busy_until is None else worker.busy_until - self._simulation.now
        for queued, _ in worker.queue:
            ahead += setting.prefill_seconds(queued.tokens, worker.cache.cached_tokens(queued))
        return ahead + setting.prefill_seconds(request.tokens, worker.cache.cached_tokens(request))

    def changed(self, place: int, events: list[KvEvent]) -> None:
        pass


class Anywhere:
    """The oracle's: with one cache and one queue there is nothing to place."""

    def place(self, request: Request) -> tuple[int, Done]:
        return 0, _nothing

    def changed(self, place: int, events: list[KvEvent]) -> None:
        pass


def _nothing(_cached: int) -> None:
    pass


def _text(request: Request) -> str:
    """A text that is equal as far as the prompts are: as many characters a block as policies take for one."""
    return "".join(key.hex().ljust(BLOCK_TOKENS * CHARACTERS_PER_TOKEN) for key in request.keys)


def bound(requests: Sequence[Request], blocks: int) -> float:
    """Hit rate with `blocks` of memory and the future known: the block that is used last, or never, is given up."""
    accesses = [key for request in requests for key in request.keys]
    upcoming: list[int] = [0] * len(accesses)
    seen: dict[bytes, int] = {}
    for place in range(len(accesses) - 1, -1, -1):
        upcoming[place] = seen.get(accesses[place], len(accesses))
        seen[accesses[place]] = place
    held: dict[bytes, int] = {}
    farthest: list[tuple[int, bytes]] = []
    hits = 0
    for key, following in zip(accesses, upcoming, strict=True):
        hits += key in held
        held[key] = following
        heapq.heappush(farthest, (-following, key))
        while len(held) > blocks:
            when, candidate = heapq.heappop(farthest)
            if held.get(candidate) == -when:
                del held[candidate]
    return hits * BLOCK_TOKENS / sum(request.tokens for request in requests)


def simulate(kind: str, requests: Sequence[Request], setting: Setting) -> Outcome:
    """`kind` is a router type, or one of REFERENCES. To be called with an event loop running."""
    if kind == "oracle":
        shared = Cache(setting.workers * setting.blocks)
        workers = [SimWorker(place, shared) for place in range(setting.workers)]
        return Simulation(setting, workers, shared=True).run(requests, Anywhere())
    workers = [SimWorker(place, Cache(setting.blocks)) for place in range(setting.workers)]
    simulation = Simulation(setting, workers)
    if kind == "all_knowing":
        return simulation.run(requests, AllKnowing(simulation))
    with mock.patch("time.monotonic", side_effect=lambda: simulation.now):
        return simulation.run(requests, RouterPlacement(kind, setting))


def compare(requests: Sequence[Request], setting: Setting, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Figures by kind, and those of the bound."""

    async def run_all() -> dict[str, dict[str, float]]:
        return {kind: simulate(kind, requests, setting).figures() for kind in kinds}

    found = asyncio.run(run_all())
    found["bound"] = {"hit_rate": bound(requests, setting.workers * setting.blocks)}
    ideal = found.get("oracle", {}).get("hit_rate", 0.0)
    for figures in found.values():
        figures["of_oracle"] = figures["hit_rate"] / ideal if ideal else math.nan
    return found
