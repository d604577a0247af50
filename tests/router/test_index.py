"""The block index against a plain model of what each worker holds."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol import KvEvent, KvEventBatch
from router.index import BlockIndex, SequenceGap, StaleBatch, WorkerBlocks

KEYS = [bytes([number]) * 16 for number in range(12)]


def snapshot(blocks: WorkerBlocks, *keys: bytes, seq: int = 0) -> KvEventBatch:
    return KvEventBatch(blocks.incarnation, seq, [KvEvent(cleared=True, stored=list(keys))])


def test_match_counts_leading_blocks_only() -> None:
    index = BlockIndex()
    first, second, third = (index.attach(name) for name in "abc")
    index.apply(first, snapshot(first, *KEYS[:5]))
    index.apply(second, snapshot(second, KEYS[0], KEYS[1], KEYS[3]))
    index.apply(third, snapshot(third, KEYS[1]))
    assert index.match(KEYS[:4]) == {first.slot: 4, second.slot: 2}
    assert index.match(KEYS[1:3]) == {first.slot: 2, second.slot: 1, third.slot: 1}
    assert index.match(KEYS[8:]) == index.match([]) == {}


def test_an_old_incarnation_changes_nothing() -> None:
    """C114: the worker restarts at the same address; its sequence starts again; a late batch of before is refused."""
    index = BlockIndex()
    old = index.attach("A")
    for seq in range(10):
        index.apply(old, KvEventBatch("A", seq, [KvEvent(cleared=seq == 0, stored=[KEYS[seq]])]))
    assert index.match(KEYS[:10]) == {old.slot: 10}
    index.detach(old)
    new = index.attach("B")
    assert index.match(KEYS[:10]) == {} and len(index) == 0
    with pytest.raises(StaleBatch):
        index.apply(old, KvEventBatch("A", 10, [KvEvent(stored=[KEYS[10]])]))
    with pytest.raises(StaleBatch):
        index.apply(new, KvEventBatch("A", 0, [KvEvent(cleared=True, stored=[KEYS[10]])]))
    index.apply(new, snapshot(new, KEYS[11]))
    assert index.match([KEYS[10]]) == {} and index.match([KEYS[11]]) == {new.slot: 1}
    index.add(old, KEYS)
    assert len(index) == 1 and len(new.keys) == 1


def test_detaching_releases_everything() -> None:
    index = BlockIndex()
    first, second = index.attach("a"), index.attach("b")
    for blocks in (first, second):
        index.apply(blocks, snapshot(blocks, *KEYS))
    index.detach(first)
    index.detach(first)
    assert len(index) == len(KEYS) and not first.keys
    index.detach(second)
    assert len(index) == 0
    assert index.attach("c").slot == 0


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_gaps_and_repeats_are_refused(seq: int) -> None:
    index = BlockIndex()
    blocks = index.attach("a")
    index.apply(blocks, snapshot(blocks, KEYS[0]))
    index.apply(blocks, KvEventBatch("a", 1, [KvEvent(stored=[KEYS[1]])]))
    with pytest.raises(SequenceGap):
        index.apply(blocks, KvEventBatch("a", seq, [KvEvent(stored=[KEYS[2]])]))
    assert blocks.keys == set(KEYS[:2])
    index.restart(blocks)
    with pytest.raises(SequenceGap, match="snapshot"):
        index.apply(blocks, KvEventBatch("a", 9, [KvEvent(stored=[KEYS[2]])]))
    index.apply(blocks, snapshot(blocks, KEYS[5], seq=9))
    assert blocks.keys == {KEYS[5]} and blocks.expected == 10


changes = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["store", "remove", "clear", "restart"]), st.sets(st.sampled_from(KEYS))
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(changes=changes, prompt=st.permutations(KEYS))
def test_any_history_leaves_what_the_workers_hold(
    changes: list[tuple[int, str, set[bytes]]], prompt: list[bytes]
) -> None:
    index = BlockIndex()
    blocks = [index.attach(str(place)) for place in range(3)]
    for worker in blocks:
        index.apply(worker, snapshot(worker))
    held: list[set[bytes]] = [set(), set(), set()]
    for place, kind, keys in changes:
        worker = blocks[place]
        if kind == "restart":
            index.detach(worker)
            blocks[place] = worker = index.attach(worker.incarnation + "'")
            held[place] = set(keys)
            index.apply(worker, snapshot(worker, *keys))
            continue
        event = KvEvent(cleared=kind == "clear")
        if kind == "store":
            event.stored = list(keys)
            held[place] |= keys
        elif kind == "remove":
            event.removed = list(keys)
            held[place] -= keys
        else:
            held[place] = set()
        assert worker.expected is not None
        index.apply(worker, KvEventBatch(worker.incarnation, worker.expected, [event]))
    assert [worker.keys for worker in blocks] == held
    assert len(index) == len(set().union(*held))
    expected = {}
    for worker, keys in zip(blocks, held, strict=True):
        depth = next((place for place, key in enumerate(prompt) if key not in keys), len(prompt))
        if depth:
            expected[worker.slot] = depth
    assert index.match(prompt) == expected


def test_a_removal_with_unknown_blocks_removes_the_rest() -> None:
    """C116"""
    index = BlockIndex()
    blocks, other = index.attach("a"), index.attach("b")
    for each in (blocks, other):
        index.apply(each, snapshot(each, *KEYS[:4]))
    index.apply(blocks, KvEventBatch("a", 1, [KvEvent(removed=[KEYS[0], b"?" * 16, KEYS[2]])]))
    assert blocks.keys == {KEYS[1], KEYS[3]} and other.keys == set(KEYS[:4])
    index.apply(blocks, KvEventBatch("a", 2, [KvEvent(stored=[KEYS[9]])]))  # its parent is not known: no exception
    assert index.match(KEYS[:4]) == {other.slot: 4}
    index.apply(other, KvEventBatch("b", 1, [KvEvent(cleared=True)]))
    assert index.match(KEYS[:4]) == {} and len(index) == 3


def test_the_tiers_follow_moves() -> None:
    index = BlockIndex()
    blocks = index.attach("a")
    index.apply(blocks, snapshot(blocks, *KEYS[:4]))
    index.apply(blocks, KvEventBatch("a", 1, [KvEvent(moved=[*KEYS[:3], KEYS[9]], level=1)]))
    assert blocks.host == set(KEYS[:3])  # a block that it does not have is in no tier
    index.apply(blocks, KvEventBatch("a", 2, [KvEvent(moved=KEYS[:1]), KvEvent(removed=KEYS[1:2])]))
    assert blocks.host == {KEYS[2]} and blocks.keys == {KEYS[0], KEYS[2], KEYS[3]}
    index.apply(blocks, KvEventBatch("a", 3, [KvEvent(cleared=True)]))
    assert not blocks.host


def test_a_long_run_is_leapt_over_and_its_end_is_exact() -> None:
    keys = [number.to_bytes(16, "big") for number in range(1000)]
    for held in (1, 15, 16, 17, 160, 999, 1000):
        index = BlockIndex()
        blocks, short = index.attach("a"), index.attach("b")
        index.add(blocks, keys[:held])
        assert index.match(keys) == {blocks.slot: held}
        index.add(short, keys[: min(3, held)])
        expected = {blocks.slot: held} | {short.slot: min(3, held)}
        assert index.match(keys) == expected


def test_of_very_many_owners_some_are_told_others_each_time() -> None:
    index = BlockIndex()
    owners = [index.attach(str(place)) for place in range(500)]
    for blocks in owners:
        index.add(blocks, KEYS[:2])
    index.add(owners[123], KEYS)
    told: set[int] = set()
    for _ in range(200):
        found = index.match(KEYS)
        assert found.pop(owners[123].slot) == len(KEYS)
        assert set(found.values()) == {2} and len(found) == 8
        told |= found.keys()
    assert len(told) > 400


def test_removing_a_large_worker_is_quick() -> None:
    """C116: less than the time in which a request should be routed, for each 10,000 blocks."""
    index = BlockIndex()
    blocks, other = index.attach("a"), index.attach("b")
    keys = [number.to_bytes(16, "big") for number in range(50_000)]
    index.add(blocks, keys)
    index.add(other, keys[:25_000])
    started = time.process_time()
    index.detach(blocks)
    assert time.process_time() - started < 0.25
    assert len(index) == 25_000 and index.match(keys) == {other.slot: 25_000}
