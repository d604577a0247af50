from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import KvEvent, KvEventBatch, ServerRole
from router.config import ROUTER_TYPES, RouterConfig
from router.index import BlockIndex
from router.policy import Need, Policy, make_policy
from router.policy.kv_cache_aware import KvCacheAware
from router.worker import Worker

KEYS = [bytes([number]) * 16 for number in range(8)]


async def workers(count: int) -> list[Worker]:
    """Async: a worker's connection pool belongs to a loop."""
    return [Worker(ServerRole.CONTEXT, "127.0.0.1", 1000 + place) for place in range(count)]


def hold(index: BlockIndex, worker: Worker, blocks: int) -> None:
    worker.blocks = index.attach(worker.address)
    index.apply(worker.blocks, KvEventBatch(worker.address, 0, [KvEvent(cleared=True, stored=KEYS[:blocks])]))


def kv_aware(index: BlockIndex, **arguments: object) -> KvCacheAware:
    policy = make_policy(RouterConfig(type="kv_cache_aware", **arguments), index)  # type: ignore[arg-type]
    assert isinstance(policy, KvCacheAware)
    return policy


async def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy = make_policy(RouterConfig(), BlockIndex())
    three = await workers(3)
    assert [policy.pick(three, Need()) for _ in range(6)] == three * 2


async def test_load_balancing_takes_the_idlest_then_the_longest_unused() -> None:
    policy = make_policy(RouterConfig(type="load_balancing"), BlockIndex())
    three = await workers(3)
    picked = [policy.pick(three, Need()) for _ in range(3)]
    assert set(picked) == set(three)
    policy.release(picked[1], Need())
    assert policy.pick(three, Need()) is picked[1]
    for worker in three:
        worker.active = 0
    assert policy.pick(three, Need()) is picked[0]


async def test_load_balancing_by_tokens() -> None:
    policy = make_policy(RouterConfig(type="load_balancing", use_tokens=True), BlockIndex())
    assert policy.needs_tokens and not policy.needs_keys
    two = await workers(2)
    long = Need(1000)
    busy = policy.pick(two, long)
    others = [policy.pick(two, Need(10)) for _ in range(5)]
    assert busy not in others
    policy.release(busy, long)
    assert busy.active_tokens == 0 and policy.pick(two, Need(10)) is busy


async def test_kv_cache_aware_prefers_the_longer_prefix() -> None:
    index = BlockIndex()
    three = await workers(3)
    for worker, blocks in zip(three, (1, 4, 2), strict=True):
        hold(index, worker, blocks)
    policy = kv_aware(index)
    need = Need(8 * 32, KEYS)
    assert policy.pick(three, need) is three[1]
    assert policy.predicted_blocks(three[1], need) == 4
    assert policy.affinity_decisions == 1


@pytest.mark.parametrize(("active", "chosen"), [(3, 0), (5, 1)])
async def test_four_requests_cost_one_block(active: int, chosen: int) -> None:
    index = BlockIndex()
    two = await workers(2)
    hold(index, two[0], 1)
    two[0].active = active
    assert kv_aware(index).pick(two, Need(32, KEYS[:1])) is two[chosen]


async def test_ties_go_to_the_least_recently_used() -> None:
    three, policy = await workers(3), kv_aware(BlockIndex())
    picked = []
    for _ in range(6):
        picked.append(policy.pick(three, Need()))
        policy.release(picked[-1], Need())
    assert picked[:3] == picked[3:] and set(picked) == set(three)


async def test_the_load_cap_passes_over_full_workers_unless_all_are() -> None:
    index = BlockIndex()
    two = await workers(2)
    hold(index, two[0], 8)
    policy = kv_aware(index, load_cap=0.5, max_batch_size=4)
    two[0].active = 2
    assert policy.pick(two, Need(256, KEYS)) is two[1]
    two[1].active = 2
    assert policy.pick(two, Need(256, KEYS)) is two[0]


async def test_routed_blocks_count_until_the_worker_says_otherwise() -> None:
    index = BlockIndex()
    two = await workers(2)
    hold(index, two[0], 0)
    policy, need = kv_aware(index), Need(64, KEYS[:2])
    policy.served(two[0], need, None)
    policy.served(two[1], need, None)  # tells no events: nothing would ever take its blocks back
    assert policy.predicted_blocks(two[0], Need(64, KEYS[:2])) == 2
    assert policy.predicted_blocks(two[1], Need(64, KEYS[:2])) == 0
    assert two[0].blocks is not None
    index.apply(two[0].blocks, KvEventBatch(two[0].address, 1, [KvEvent(removed=KEYS[:1])]))
    assert policy.predicted_blocks(two[0], Need(64, KEYS[:2])) == 0
    off = kv_aware(index, track_routed_blocks=False)
    off.routed(two[0], need)
    assert off.predicted_blocks(two[0], Need(64, KEYS[:2])) == 0


@given(loads=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), min_size=1, max_size=6), cap=st.floats(0.1, 2))
async def test_the_choice_has_the_best_score_of_those_below_the_cap(loads: list[tuple[int, int]], cap: float) -> None:
    index = BlockIndex()
    some = await workers(len(loads))
    for worker, (active, blocks) in zip(some, loads, strict=True):
        worker.active = active
        hold(index, worker, blocks)

    def score(place: int) -> float:
        return loads[place][1] - 0.25 * loads[place][0]

    open_places = [place for place, (active, _) in enumerate(loads) if active < cap * 16] or list(range(len(loads)))
    policy = kv_aware(index, load_cap=cap, max_batch_size=16)
    chosen = some.index(policy.pick(some, Need(256, KEYS)))
    if len(some) > 1:
        assert chosen in open_places
        assert math.isclose(score(chosen), max(map(score, open_places)))
    assert some[chosen].active == loads[chosen][0] + 1


@given(
    kind=st.sampled_from(ROUTER_TYPES),
    turns=st.lists(st.tuples(st.booleans(), st.integers(0, 500)), max_size=60),
)
async def test_reservations_return_to_nothing(kind: str, turns: list[tuple[bool, int]]) -> None:
    some = await workers(3)
    policy: Policy = make_policy(RouterConfig(type=kind), BlockIndex())
    taken: list[tuple[Worker, Need]] = []
    for picks, tokens in turns:
        if picks or not taken:
            need = Need(tokens, KEYS[: tokens % 8])
            taken.append((policy.pick(some, need), need))
        else:
            policy.release(*taken.pop(tokens % len(taken)))
        assert sum(worker.active for worker in some) == len(taken)
    while taken:
        policy.release(*taken.pop())
    assert all(worker.active == worker.active_tokens == 0 for worker in some)


@pytest.mark.parametrize("kind", ROUTER_TYPES)
async def test_a_worker_that_is_added_gets_its_share(kind: str) -> None:
    """C132: more than a tenth of the next 50 requests, one at a time and of prompts that nobody has."""
    two, index = await workers(2), BlockIndex()
    for worker in two:
        hold(index, worker, 0)
    policy = make_policy(RouterConfig(type=kind), index)

    def serve(candidates: list[Worker], number: int) -> Worker:
        need = Need(64, [number.to_bytes(16, "little"), (number + 1).to_bytes(16, "big")], 32)
        worker = policy.pick(candidates, need)
        policy.served(worker, need, 0)
        policy.release(worker, need)
        return worker

    for number in range(100):
        serve(two[:1], 1000 + 2 * number)
    assert sum(serve(two, 5000 + 2 * number) is two[1] for number in range(50)) > 5


@pytest.mark.parametrize("kind", ROUTER_TYPES)
async def test_concurrent_requests_with_one_prefix_spread(kind: str) -> None:
    """No two choices see the same loads, however many are made in one turn of the loop."""
    eight, index = await workers(8), BlockIndex()
    for worker in eight:
        hold(index, worker, 0)
    policy = make_policy(RouterConfig(type=kind, tokens_per_block=32), index)
    for _ in range(1000):
        policy.pick(eight, Need(256, KEYS, 32))
    loads = [worker.active for worker in eight]
    assert sum(loads) == 1000 and max(loads) - min(loads) <= 2


@pytest.mark.parametrize("kind", ROUTER_TYPES)
async def test_scores_cover_all_candidates_and_change_nothing(kind: str) -> None:
    three, index = await workers(3), BlockIndex()
    for worker, blocks in zip(three, (0, 4, 2), strict=True):
        hold(index, worker, blocks)
    policy = make_policy(RouterConfig(type=kind, tokens_per_block=32), index)
    scores = policy.scores(three, Need(256, KEYS, 32))
    assert len(scores) == 3 and all("score" in score for score in scores)
    assert policy.decisions == 0 and not any(worker.active for worker in three)
    if policy.needs_keys:
        assert max(range(3), key=lambda place: scores[place]["score"]) == 1
