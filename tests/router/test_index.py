"""The block index against a plain model of what each worker holds."""

from __future__ import annotations

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
