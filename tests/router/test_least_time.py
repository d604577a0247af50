"""Least expected time: the pace it learns, what it weighs, and how it spreads."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any
from unittest import mock

import pytest

from kvstore.hashing import block_keys
from kvstore.protocol import KvEvent, KvEventBatch, ServerRole
from router.config import RouterConfig
from router.index import BlockIndex
from router.pace import Pace
from router.policy import Need, make_policy
from router.policy.least_time import LeastTime
from router.worker import Worker, WorkerState

BLOCK = 32


class Rig:
    """Workers of a policy under a clock of the test's own."""

    def __init__(self, count: int, **arguments: Any) -> None:
        self.index = BlockIndex()
        config = RouterConfig(type="least_time", tokens_per_block=BLOCK, **arguments)
        policy = make_policy(config, self.index)
        assert isinstance(policy, LeastTime)
        self.policy = policy
        self.workers = [Worker(ServerRole.CONTEXT, "127.0.0.1", 1000 + place) for place in range(count)]
        self.now = 100.0
        for worker in self.workers:
            worker.state = WorkerState.READY
            worker.blocks = self.index.attach(worker.address, worker)
            self.tell(worker, 0, KvEvent(cleared=True))

    def tell(self, worker: Worker, seq: int, *events: KvEvent) -> None:
        assert worker.blocks is not None
        self.index.apply(worker.blocks, KvEventBatch(worker.address, seq, list(events)))

    def pick(self, need: Need) -> Worker:
        with mock.patch("time.monotonic", side_effect=lambda: self.now):
            return self.policy.pick(self.workers, need)

    def finish(self, worker: Worker, need: Need, seconds: float = 0.0, cached: int | None = None) -> None:
        self.now += seconds
        with mock.patch("time.monotonic", side_effect=lambda: self.now):
            self.policy.served(worker, need, cached)
            self.policy.release(worker, need)


def prompt(*parts: tuple[int, int]) -> Need:
    """Of (seed, tokens) parts: equal beginnings have equal keys."""
    ids = [seed * 1_000_003 + place for seed, length in parts for place in range(length)]
    return Need(len(ids), block_keys(ids, BLOCK), BLOCK)


class TestPace:
    @pytest.mark.parametrize(("fixed", "rate"), [(0.0, 1e-4), (0.02, 1e-4), (0.5, 1e-6)])
    def test_it_finds_the_line(self, fixed: float, rate: float) -> None:
        pace, rng = Pace(), random.Random(1)
        for _ in range(200):
            tokens = rng.randrange(1, 8000)
            pace.observe(tokens, fixed + rate * tokens)
        assert pace.known
        assert pace.seconds(4000) == pytest.approx(fixed + rate * 4000, rel=0.05)
        assert pace.per_token >= 0 and pace.fixed >= 0

    def test_equal_prompts_give_a_rate_through_zero(self) -> None:
        pace = Pace()
        for _ in range(10):
            pace.observe(1000, 0.1)
        assert pace.seconds(500) == pytest.approx(0.05)

    def test_it_follows_a_worker_that_slows_down(self) -> None:
        pace = Pace()
        for seconds in [0.1] * 100 + [0.3] * 150:
            pace.observe(1000, seconds)
        assert pace.seconds(1000) == pytest.approx(0.3, rel=0.05)

    def test_no_tokens_at_all_is_no_division_by_zero(self) -> None:
        pace = Pace()
        pace.observe(0, 0.01)
        assert pace.seconds(0) == pytest.approx(0.01)


class TestChoice:
    async def test_a_long_prefix_wins_and_a_queue_beats_it(self) -> None:
        rig = Rig(2)
        rig.tell(rig.workers[1], 1, KvEvent(stored=list(prompt((1, 3200)).keys)))
        assert rig.pick(prompt((1, 3200), (2, 32))) is rig.workers[1]
        for place in range(30):
            rig.pick(prompt((100 + place, 3200)))
        with mock.patch("time.monotonic", side_effect=lambda: rig.now):
            scores = rig.policy.scores(rig.workers, prompt((1, 3200), (3, 32)))
        assert all(score["queue_seconds"] > 1 for score in scores)
        assert scores[0]["compute_seconds"] > 10 * scores[1]["compute_seconds"]

    async def test_a_slow_worker_gets_less(self) -> None:
        rig = Rig(2)
        for place in range(200):
            need = prompt((place, 1000))
            worker = rig.pick(need)
            rig.finish(worker, need, 0.5 if worker is rig.workers[0] else 0.05)
        counts: collections.Counter[Worker] = collections.Counter(rig.pick(prompt((900 + n, 1000))) for n in range(110))
        assert counts[rig.workers[1]] > 5 * counts[rig.workers[0]] > 0

    async def test_what_the_pool_has_is_fetched_and_not_computed(self) -> None:
        rig = Rig(2, pool=True)
        rig.tell(rig.workers[0], 1, KvEvent(stored=list(prompt((1, 3200)).keys)))
        need = prompt((1, 3200), (2, 64))
        with mock.patch("time.monotonic", side_effect=lambda: rig.now):
            own, other = rig.policy.scores(rig.workers, need)
        assert own["fetch_seconds"] == 0 < other["fetch_seconds"]
        assert own["compute_seconds"] == pytest.approx(other["compute_seconds"])
        assert own["score"] > other["score"]

    async def test_host_memory_is_slower_than_the_pages(self) -> None:
        rig = Rig(2)
        keys = list(prompt((1, 3200)).keys)
        for worker in rig.workers:
            rig.tell(worker, 1, KvEvent(stored=keys))
        rig.tell(rig.workers[0], 2, KvEvent(moved=keys, level=1))
        assert rig.pick(prompt((1, 3200), (2, 64))) is rig.workers[1]
        rig.tell(rig.workers[0], 3, KvEvent(moved=keys, level=0))
        with mock.patch("time.monotonic", side_effect=lambda: rig.now):
            assert rig.policy.scores(rig.workers, prompt((1, 3200)))[0]["fetch_seconds"] == 0

    async def test_fetch_rates_are_measured(self) -> None:
        rig = Rig(1, pool=True)
        for place in range(30):
            need = prompt((place, 1024))
            rig.finish(rig.pick(need), need, 0.1024)
        pace = rig.policy._fleet
        pace.observe_fetch(1000, 0.03)
        assert pace.per_fetched_token == pytest.approx(3e-5)

    async def test_prompts_that_cannot_be_read_are_spread_by_load(self) -> None:
        rig = Rig(4)
        counts = collections.Counter(rig.pick(Need()) for _ in range(40))
        assert set(counts.values()) == {10}


class TestSpread:
    async def test_a_thousand_at_once_with_one_prefix(self) -> None:
        """Score and reservation are one step: no two picks see the same state."""
        rig = Rig(8)
        counts = collections.Counter(rig.pick(prompt((1, 640), (1000 + n, 40))) for n in range(1000))
        assert max(counts.values()) - min(counts.values()) <= 2 and len(counts) == 8
        assert sum(worker.active for worker in rig.workers) == 1000

    async def test_paced_traffic_with_a_common_beginning(self) -> None:
        """C112: one request at a time; nothing is ever in flight at a choice."""
        rig = Rig(4)
        hits, shares = 0, collections.Counter[Worker]()
        for place in range(400):
            need = prompt((1, 64), (1000 + place, 320))
            worker = rig.pick(need)
            hits += rig.policy.predicted_blocks(worker, prompt((1, 64))) > 0 and place > 0
            shares[worker] += 1
            rig.finish(worker, need, 0.03)
        assert max(shares.values()) <= 200
        assert hits > 0.9 * 400

    async def test_paced_sessions_stay_and_spread(self) -> None:
        rig = Rig(4)
        home: dict[int, Worker] = {}
        stayed = 0
        for turn in range(10):
            for session in range(20):
                need = prompt(*((1 + session * 100 + part, 512) for part in range(turn + 1)))
                worker = rig.pick(need)
                stayed += home.setdefault(session, worker) is worker
                rig.finish(worker, need, 0.02)
        shares = collections.Counter(home.values())
        assert len(shares) == 4 and max(shares.values()) <= 8
        assert stayed >= 0.95 * 200

    async def test_a_long_request_counts_by_its_tokens(self) -> None:
        rig = Rig(2)
        busy = rig.pick(prompt((1, 16000)))
        others = [rig.pick(prompt((10 + place, 320))) for place in range(20)]
        assert others.count(busy) <= 2

    async def test_a_worker_that_lost_its_cache_comes_back(self) -> None:
        """C113: 50 conversations on 4 workers; one is emptied and gets its share again, the others keep theirs.

        A conversation ends after 20 turns, and a new one takes its place.
        """
        rig = Rig(4)
        open_ones = {place: [place, 0] for place in range(50)}  # name, turns
        rng = random.Random(3)

        def play(steps: int) -> tuple[collections.Counter[Worker], dict[int, list[Worker]]]:
            shares, homes = collections.Counter[Worker](), collections.defaultdict(list)
            for _ in range(steps):
                place = rng.randrange(50)
                if open_ones[place][1] == 20:
                    open_ones[place] = [open_ones[place][0] + 50, 0]
                open_ones[place][1] += 1
                session, turns = open_ones[place]
                need = prompt(*((session * 100 + part, 256) for part in range(turns)))
                worker = rig.pick(need)
                shares[worker] += 1
                homes[session].append(worker)
                rig.finish(worker, need, 0.01)
            return shares, homes

        play(600)
        emptied = rig.workers[2]
        rig.tell(emptied, 1, KvEvent(cleared=True))
        play(300)
        shares, homes = play(1000)
        assert 0.15 <= shares[emptied] / 1000 <= 0.35
        moves = sum(a is not b for home in homes.values() for a, b in itertools.pairwise(home))
        assert moves <= 0.12 * 1000

    async def test_many_workers_are_not_all_looked_at(self) -> None:
        rig = Rig(300)
        rig.tell(rig.workers[217], 1, KvEvent(stored=list(prompt((1, 6400)).keys)))
        assert rig.pick(prompt((1, 6400), (2, 32))) is rig.workers[217]
        counts = collections.Counter(rig.pick(prompt((100 + n, 320))) for n in range(3000))
        assert max(counts.values()) <= 14 and len(counts) >= 299


class TestPredictions:
    async def test_a_prompt_counts_from_the_moment_it_is_sent(self) -> None:
        rig = Rig(2)
        need = prompt((1, 640))
        worker = rig.pick(need)
        assert rig.policy.predicted_blocks(worker, prompt((1, 640))) == 20
        rig.policy.failed(worker, need)
        rig.policy.release(worker, need)
        assert rig.policy.predicted_blocks(worker, prompt((1, 640))) == 0
        assert len(rig.index) == 0

    async def test_what_events_confirmed_outlives_a_failure(self) -> None:
        rig = Rig(1)
        need = prompt((1, 640))
        worker = rig.pick(need)
        rig.tell(worker, 1, KvEvent(stored=list(need.keys[:5])))
        rig.policy.failed(worker, need)
        assert rig.policy.predicted_blocks(worker, prompt((1, 640))) == 5

    async def test_predictions_that_nothing_confirms_expire_and_are_counted(self) -> None:
        rig = Rig(1)
        lost = prompt((1, 640))
        rig.finish(rig.pick(lost), lost, 0.1)
        for _ in range(2):
            rig.now += 31
            other = prompt((2, 320))
            rig.finish(rig.pick(other), other, 0.1)
        assert rig.policy.predicted_blocks(rig.workers[0], prompt((1, 640))) == 0
        assert rig.index.expired_predictions == 20

    async def test_a_worker_that_leaves_is_forgotten(self) -> None:
        rig = Rig(2)
        for place in range(4):
            need = prompt((place, 64))
            rig.finish(rig.pick(need), need, 0.1)
        rig.policy.forget(rig.workers[0])
        assert rig.workers[0] not in rig.policy._loads and not rig.policy._open
