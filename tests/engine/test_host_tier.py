"""Retention priorities, the host memory tier and partly matching blocks: what is kept, and that its bytes are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_rig import BLOCK, Worker, expected, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.eviction import EvictionQueue
from engine.host_tier import HostTier, host_buffer
from engine.messages import Retention, RetentionRange
from kvstore.hashing import block_keys
from kvstore.protocol import KvEvent

KEYS = block_keys(range(12), 1)


def take(pool: BlockPool, count: int) -> list[int]:
    pool.reserve(count)
    return pool.allocate(count)


def cached(pool: BlockPool, keys: list[bytes], priority: int = 35, seconds: float | None = None) -> list[int]:
    """Blocks that a finished sequence has left behind."""
    blocks = take(pool, len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.register(block, key, priority=priority, seconds=seconds)
    pool.release(blocks)
    return blocks


def host(count: int) -> HostTier:
    return HostTier(count, lambda block, place: None, lambda place, block: None)


# ---------------------------------------------------------------- retention priorities


def test_lowest_priority_first_then_least_recently_used() -> None:
    queue = EvictionQueue()
    for item, priority in enumerate((35, 80, 35, 0, 100)):
        queue.add(item, priority)
    queue.remove(0)
    queue.add(0, 35)
    assert [queue.pop() for _ in range(5)] == [3, 2, 0, 1, 4] and not len(queue)


def test_a_block_of_high_priority_outlives_younger_ones() -> None:
    pool = BlockPool(3)
    cached(pool, KEYS[:1], priority=90)
    cached(pool, KEYS[1:3])
    take(pool, 2)
    assert pool.resident_keys() == KEYS[:1]


def test_a_priority_holds_for_its_time() -> None:
    now = [0.0]
    pool = BlockPool(2, clock=lambda: now[0])
    cached(pool, KEYS[:1], priority=90, seconds=5)
    cached(pool, KEYS[1:2])
    now[0] = 6.0
    take(pool, 1)
    assert pool.resident_keys() == KEYS[:1], "of equal priority now, and parked last when it changed"
    pool = BlockPool(2, clock=lambda: now[0])
    cached(pool, KEYS[:1], priority=90, seconds=5)
    cached(pool, KEYS[1:2])
    take(pool, 1)
    assert pool.resident_keys() == KEYS[:1]


def test_times_that_are_over_are_not_kept() -> None:
    now = [0.0]
    pool = BlockPool(4, clock=lambda: now[0])
    for key in KEYS:
        now[0] += 10.0
        cached(pool, [key], priority=90, seconds=5)
    assert len(pool._expiries._heap) == 1


def test_a_request_says_how_long_its_blocks_are_kept() -> None:
    kept = Retention([RetentionRange(0, 8, 90)], decode_priority=5)
    with Worker(num_blocks=12) as worker:
        system = list(range(10, 18))
        worker.ask([*system, 20, 21], greedy(1), retention=kept)
        for index in range(8):
            worker.ask([30 + index] * 20, greedy(1))
        assert worker.ask([*system, 22], greedy(1)).cached_tokens == 8


def test_a_priority_out_of_range_is_refused() -> None:
    with Worker() as worker:
        error = worker.ask([5], greedy(1), retention=Retention(decode_priority=101)).error
        assert error is not None and "101 is outside 0..100" in error.message
        error = worker.ask([5], greedy(1), priority=1.5).error
        assert error is not None and error.param == "priority"


# ---------------------------------------------------------------- host memory


def test_evicted_blocks_go_to_host_memory_and_come_back() -> None:
    pool = BlockPool(2, host=host(2))
    cached(pool, KEYS[:2])
    pool.drain_events()
    blocks = take(pool, 2)
    assert pool.drain_events() == [KvEvent(moved=[KEYS[1], KEYS[0]], level=1)]
    pool.release(blocks)
    found = pool.match(KEYS[:3])
    assert found == [None, None] and set(pool.resident_keys()) == set(KEYS[:2])
    pool.reserve(2)
    assert len(pool.claim(KEYS[:2], found)) == 2
    assert pool.drain_events() == [KvEvent(moved=KEYS[:2], level=0)] and not len(pool.host or ())


def test_what_has_to_leave_host_memory_is_gone() -> None:
    pool = BlockPool(1, host=host(1))
    for key in KEYS[:3]:
        cached(pool, [key])
    events = pool.drain_events()
    assert [key for event in events for key in event.removed] == KEYS[:1]
    assert set(pool.resident_keys()) == set(KEYS[1:3])


def test_bringing_back_may_itself_evict_into_a_full_host_tier() -> None:
    pool = BlockPool(2, host=host(2))
    cached(pool, KEYS[:2])
    cached(pool, KEYS[2:4])
    found = pool.match(KEYS[:2])
    pool.reserve(2)
    pool.claim(KEYS[:2], found)
    assert pool.match(KEYS[:2]) == [0, 1] and len(pool.resident_keys()) == 3, "the first place was free only after it"


def test_blocks_that_nobody_expects_to_use_again_are_not_saved() -> None:
    pool = BlockPool(1, host=host(1))
    cached(pool, KEYS[:1], priority=10)
    take(pool, 1)
    assert pool.resident_keys() == []


def test_a_more_important_block_is_not_dropped_from_host_memory_for_a_lesser_one() -> None:
    pool = BlockPool(1, host=host(1))
    cached(pool, KEYS[:1], priority=90)
    cached(pool, KEYS[1:2], priority=40)
    cached(pool, KEYS[2:3], priority=40)
    assert set(pool.resident_keys()) == {KEYS[0], KEYS[2]}


def test_a_block_computed_again_leaves_host_memory() -> None:
    pool = BlockPool(1, host=host(1))
    cached(pool, KEYS[:1])
    [block] = take(pool, 1)
    pool.register(block, KEYS[0])
    assert not len(pool.host or ()) and pool.match(KEYS[:1]) == [block]


def test_a_snapshot_tells_both_tiers() -> None:
    pool = BlockPool(1, host=host(1))
    assert pool.snapshot() == KvEvent(cleared=True)
    cached(pool, KEYS[:1])
    cached(pool, KEYS[1:2])
    assert pool.snapshot() == KvEvent(cleared=True, stored=[KEYS[1], KEYS[0]], moved=KEYS[:1], level=1)


def test_a_buffer_too_small_for_one_block_is_no_tier() -> None:
    assert host_buffer(10, 11, lambda block: memoryview(b"")) is None


class Tiers(RuleBasedStateMachine):
    """Contents are the keys themselves: a block always holds what its key says, and the events tell where."""

    TOTAL, HOST = 6, 4

    def __init__(self) -> None:
        super().__init__()
        self.device: list[bytes] = [b""] * self.TOTAL
        self.places: list[bytes] = [b""] * self.HOST
        self.pool = BlockPool(self.TOTAL, host=HostTier(self.HOST, self.copy_out, self.copy_in))
        self.chains = [block_keys([chain, *range(4)], 1) for chain in range(5)]
        self.held: list[list[int]] = []
        self.level: dict[bytes, int] = {}

    def copy_out(self, block: int, place: int) -> None:
        self.places[place] = self.device[block]

    def copy_in(self, place: int, block: int) -> None:
        self.device[block] = self.places[place]

    @rule(chain=st.integers(0, 4), length=st.integers(1, 4), priority=st.sampled_from([10, 35, 80]))
    def use(self, chain: int, length: int, priority: int) -> None:
        keys = self.chains[chain][:length]
        found = self.pool.match(keys)
        new = length - sum(block is not None for block in found)
        if not self.pool.can_reserve(new, found):
            return
        self.pool.reserve(new)
        table = self.pool.claim(keys[: len(found)], found)
        for key, block in zip(keys, table, strict=False):
            assert self.device[block] == key
        for key in keys[len(table) :]:
            [block] = self.pool.allocate(1)
            self.device[block] = key
            self.pool.register(block, key, priority=priority)
            table.append(block)
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert pool.used + pool.pinned + pool.reusable + pool.free == self.TOTAL and pool.reserved == 0

    @invariant()
    def events_tell_the_tiers(self) -> None:
        for event in self.pool.drain_events():
            for key in event.stored:
                assert key not in self.level
                self.level[key] = 0
            for key in event.removed:
                del self.level[key]
            for key in event.moved:
                assert self.level[key] == 1 - event.level
                self.level[key] = event.level
        assert self.pool.host is not None
        assert {key for key, level in self.level.items() if level} == set(self.pool.host.keys())
        assert set(self.level) == set(self.pool.resident_keys())


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_answers_from_host_memory_are_exact(seed: int, places: int, part: bool) -> None:
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 97) for _ in range(rng.randrange(4, 30))] for _ in range(4)]
    with Worker(num_blocks=12, host_cache_size=places * BLOCK * 8, enable_partial_reuse=part) as worker:
        for _ in range(14):
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randrange(1, len(stem) + 1)], rng.randrange(3, 97)]
            assert worker.ask(prompt, greedy(4)).choices() == expected(prompt, greedy(4))
        worker.wait_baseline()


def test_a_prefix_beyond_the_pool_is_still_cached() -> None:
    prompts = [[10 + index, *range(20, 39)] for index in range(6)]

    def second_round(**config: Any) -> int:
        with Worker(num_blocks=8, **config) as worker:
            for prompt in prompts * 2:
                cached_tokens = worker.ask(prompt, greedy(1)).cached_tokens
            worker.wait(lambda: worker.stats.requests_running == 0)
            assert worker.stats.blocks_onboarded == (4 * 6 if config else 0)
            return cached_tokens

    assert second_round() == 0
    assert second_round(host_cache_size=64 * BLOCK * 8) == 16


# ---------------------------------------------------------------- partly matching blocks


@pytest.mark.parametrize(("common", "computed"), [(9, 4), (10, 3), (11, 2), (12, 1)])
def test_the_beginning_of_a_block_is_reused_by_a_copy(common: int, computed: int) -> None:
    first = list(range(10, 30))
    second = [*first[:common], *range(50, 63 - common)]
    with Worker() as worker:
        worker.ask(first, greedy(1))
        worker.runner.steps.clear()
        result = worker.ask(second, greedy(3))
        assert result.choices() == expected(second, greedy(3)) and result.cached_tokens == common // BLOCK * BLOCK
        assert sum(len(chunk.tokens) for chunk in worker.runner.steps[0]) == computed
        assert worker.ask(first, greedy(3)).choices() == expected(first, greedy(3)), "the source is as it was"
        worker.wait_baseline()


def test_a_salt_separates_first_blocks_too() -> None:
    with Worker() as worker:
        worker.ask([10, 11, 12, 13, 14], greedy(1), cache_salt="a")
        worker.runner.steps.clear()
        worker.ask([10, 11, 12, 50, 14], greedy(1), cache_salt="b")
        assert sum(len(chunk.tokens) for step in worker.runner.steps for chunk in step) == 5
        worker.ask([10, 11, 12, 60, 14], greedy(1), cache_salt="a")
        assert len(worker.runner.steps[-1][0].tokens) == 2


def test_not_without_reuse_and_not_beside_a_pool() -> None:
    from engine.config import EngineConfig, PoolConfig
    from engine.rules import rules_of

    assert rules_of(EngineConfig("m")).partial_reuse
    assert not rules_of(EngineConfig("m", enable_block_reuse=False)).partial_reuse
    assert not rules_of(EngineConfig("m", enable_partial_reuse=False)).partial_reuse
    assert not rules_of(EngineConfig("m", pool=PoolConfig(pool="none:1"))).partial_reuse
