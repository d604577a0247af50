from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from kvstore.hashing import block_keys
from kvstore.protocol import KvEvent

KEYS = block_keys(range(8), 1)


def take(pool: BlockPool, count: int) -> list[int]:
    pool.reserve(count)
    return pool.allocate(count)


def cached(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Blocks that a finished sequence has left behind."""
    blocks = take(pool, len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.register(block, key)
    pool.release(blocks)
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    assert pool.used + pool.pinned + pool.reusable + pool.free == pool.num_blocks
    return pool.used, pool.pinned, pool.reusable, pool.free


def test_life_of_a_block() -> None:
    pool = BlockPool(4)
    [block] = take(pool, 1)
    assert counts(pool) == (1, 0, 0, 3)
    pool.register(block, KEYS[0])
    pool.pin([block])
    pool.release([block])
    assert counts(pool) == (0, 1, 0, 3)
    pool.unpin([block])
    assert counts(pool) == (0, 0, 1, 3) and pool.match(KEYS) == [block]
    pool.acquire([block])
    assert counts(pool) == (1, 0, 0, 3)
    pool.release([block])
    take(pool, 4)
    assert counts(pool) == (4, 0, 0, 0) and pool.match(KEYS) == [] and pool.evicted == 1
    assert "used 4" in repr(pool)


def test_blocks_without_a_key_become_free() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 2)
    pool.release(blocks)
    assert counts(pool) == (0, 0, 0, 2)


def test_a_match_ends_at_the_first_gap() -> None:
    """A block behind an evicted one is there, and of no use (C106)."""
    pool = BlockPool(3)
    first = cached(pool, KEYS[:1])
    rest = cached(pool, KEYS[1:3])
    pool.acquire(rest)
    take(pool, 1)  # evicts the first block, the only one that nobody uses
    assert set(pool.resident_keys()) == set(KEYS[1:3])
    assert pool.match(KEYS[:3]) == [] and first


def test_the_leaf_is_evicted_first_and_the_oldest_chain_before_the_younger() -> None:
    pool = BlockPool(4)
    old, young = block_keys(range(2), 1), block_keys(range(10, 12), 1)
    cached(pool, old)
    cached(pool, young)
    evicted = []
    for _ in range(4):
        before = set(pool.resident_keys())
        take(pool, 1)
        evicted += list(before - set(pool.resident_keys()))
    assert evicted == [old[1], old[0], young[1], young[0]]


def test_use_makes_a_block_young() -> None:
    pool = BlockPool(2)
    a, b = cached(pool, [KEYS[0]]), cached(pool, [KEYS[1]])
    pool.acquire(a)
    pool.release(a)
    assert take(pool, 1) == b


def test_free_blocks_are_taken_before_any_is_evicted() -> None:
    pool = BlockPool(3)
    cached(pool, KEYS[:1])
    take(pool, 2)
    assert pool.evicted == 0
    take(pool, 1)
    assert pool.evicted == 1


def test_one_key_has_one_block() -> None:
    pool = BlockPool(2)
    a, b = take(pool, 2)
    assert pool.register(a, KEYS[0]) and not pool.register(b, KEYS[0])
    pool.release([a, b])
    assert counts(pool) == (0, 0, 1, 1) and pool.match(KEYS) == [a]


def test_without_reuse_nothing_is_found() -> None:
    pool = BlockPool(2, reuse=False)
    [block] = take(pool, 1)
    assert not pool.register(block, KEYS[0])
    pool.release([block])
    assert counts(pool) == (0, 0, 0, 2) and pool.drain_events() == []


def test_reservations_count_blocks_that_acquiring_takes_out_of_the_cache() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, KEYS[:2])
    assert pool.can_reserve(2, blocks) and not pool.can_reserve(3, blocks)
    pool.reserve(2)
    assert not pool.can_reserve(1, blocks) and pool.can_reserve(2)
    pool.acquire(blocks)
    assert pool.available == pool.reserved == 2
    with pytest.raises(RuntimeError, match="reserving"):
        pool.reserve(1)
    with pytest.raises(RuntimeError, match="beyond the reservation"):
        pool.allocate(3)
    pool.unreserve(2)
    assert pool.can_reserve(2)


def test_a_new_owner_is_announced_before_the_block_is_handed_out() -> None:
    owners: list[int] = []
    pool = BlockPool(2, on_new_owner=owners.append)
    blocks = take(pool, 2)
    assert owners == blocks
    pool.acquire(blocks)
    assert owners == blocks


@pytest.mark.parametrize("kind", ["shared", "pinned", "findable"])
def test_shared_blocks_are_not_writable(kind: str) -> None:
    pool = BlockPool(1)
    [block] = take(pool, 1)
    pool.check_writable(block)
    {"shared": lambda: pool.acquire([block]), "pinned": lambda: pool.pin([block])}.get(
        kind, lambda: pool.register(block, KEYS[0])
    )()
    with pytest.raises(RuntimeError, match=f"write to block {block}"):
        pool.check_writable(block)


def test_double_frees_are_errors() -> None:
    pool = BlockPool(1)
    [block] = take(pool, 1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="without a reference"):
        pool.release([block])
    with pytest.raises(RuntimeError, match="without a pin"):
        pool.unpin([block])
    with pytest.raises(RuntimeError, match="without an owner"):
        pool.pin([block])
    with pytest.raises(RuntimeError, match="no content"):
        pool.acquire([block])


def test_events_tell_the_cache_in_order() -> None:
    pool = BlockPool(2)
    cached(pool, KEYS[:2])
    take(pool, 1)
    assert pool.drain_events() == [KvEvent(stored=KEYS[:2]), KvEvent(removed=[KEYS[1]])]
    assert pool.drain_events() == []
