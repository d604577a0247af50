from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.handoff import Handoff, HandoffConflict, HandoffState, HandoffTable

TIMEOUT = 10.0
OPENED = (None, HandoffState.OFFERED)
FETCH = (HandoffState.OFFERED, HandoffState.FETCHING)
ACK = (HandoffState.FETCHING, HandoffState.DONE)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.ended: list[tuple[int, HandoffState]] = []
        self.freed: Counter[int] = Counter()
        self.table: HandoffTable[int] = HandoffTable("me", TIMEOUT, self._on_end, self.clock)

    def _on_end(self, handoff: Handoff[int]) -> None:
        self.ended.append((handoff.key, handoff.state))
        self.freed.update(handoff.pages)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_whole_way(rig: Rig) -> None:
    rig.table.offer(1, [4, 5])
    assert rig.table.count(HandoffState.OFFERED) == 1 and 1 in rig.table
    assert rig.table.begin_fetch(1, "me")
    assert rig.table.count(HandoffState.FETCHING) == 1 and not rig.ended
    assert rig.table.acknowledge(1, "me")
    assert rig.ended == [(1, HandoffState.DONE)] and rig.freed == {4: 1, 5: 1}
    assert rig.table.edges == {OPENED: 1, FETCH: 1, ACK: 1}
    assert len(rig.table) == 0 and rig.table.next_deadline() is None
    assert "ended 1" in repr(rig.table)


def test_an_ack_without_an_announced_fetch_takes_both_edges(rig: Rig) -> None:
    rig.table.offer(1, [4])
    assert rig.table.acknowledge(1)
    assert rig.table.edges == {OPENED: 1, FETCH: 1, ACK: 1}


@pytest.mark.parametrize("fetching", [False, True])
def test_release_and_expiry_end_both_open_states(rig: Rig, fetching: bool) -> None:
    for key in (1, 2):
        rig.table.offer(key, [key])
        if fetching:
            rig.table.begin_fetch(key)
    assert rig.table.release(1)
    rig.clock.now += TIMEOUT
    assert [handoff.key for handoff in rig.table.expire()] == [2]
    assert rig.ended == [(1, HandoffState.RELEASED), (2, HandoffState.EXPIRED)]
    source = HandoffState.FETCHING if fetching else HandoffState.OFFERED
    assert rig.table.edges[source, HandoffState.RELEASED] == rig.table.edges[source, HandoffState.EXPIRED] == 1


def test_expiry_is_per_hand_off_and_not_early(rig: Rig) -> None:
    rig.table.offer(1, [1])
    rig.clock.now += 4
    rig.table.offer(2, [2])
    assert rig.table.next_deadline() == 110.0
    rig.clock.now = 109.9
    assert rig.table.expire() == []
    rig.clock.now = 110.0
    rig.table.expire()
    assert rig.ended == [(1, HandoffState.EXPIRED)] and rig.table.next_deadline() == 114.0


def test_an_open_id_is_not_offered_again(rig: Rig) -> None:
    rig.table.offer(1, [1])
    with pytest.raises(HandoffConflict, match="1 is already open"):
        rig.table.offer(1, [2])
    rig.table.release(1)
    assert rig.freed == {1: 1}


@pytest.mark.parametrize("first", ["acknowledge", "release", "expire"])
@pytest.mark.parametrize("second", ["acknowledge", "release", "begin_fetch"])
def test_after_the_end_nothing_changes(rig: Rig, first: str, second: str) -> None:
    rig.table.offer(1, [1])
    if first == "expire":
        rig.clock.now += TIMEOUT
        rig.table.expire()
    else:
        getattr(rig.table, first)(1)
    edges = Counter(rig.table.edges)
    assert getattr(rig.table, second)(1) is False
    assert rig.freed == {1: 1} and rig.table.edges == edges and rig.table.ignored == 1


def test_an_ended_id_may_be_offered_anew(rig: Rig) -> None:
    rig.table.offer(1, [1])
    rig.table.release(1)
    rig.table.release(1)
    rig.table.offer(1, [2])
    assert 1 in rig.table and rig.freed == {1: 1}


def test_a_release_that_overtakes_the_offer_ends_it_at_once(rig: Rig) -> None:
    assert rig.table.release(1) is False
    rig.table.offer(1, [7])
    assert rig.ended == [(1, HandoffState.RELEASED)] and rig.freed == {7: 1} and 1 not in rig.table


def test_an_early_release_is_forgotten_after_the_timeout(rig: Rig) -> None:
    rig.table.release(1)
    rig.clock.now += TIMEOUT
    rig.table.offer(1, [7])
    assert 1 in rig.table


@pytest.mark.parametrize("message", ["acknowledge", "release", "begin_fetch"])
def test_another_incarnation_is_ignored(rig: Rig, message: str) -> None:
    rig.table.offer(1, [1])
    assert getattr(rig.table, message)(1, "other") is False
    assert rig.table.count(HandoffState.OFFERED) == 1 and rig.table.ignored == 1
    assert getattr(rig.table, message)(2, "other") is False
    rig.table.offer(2, [2])  # a stranger's release leaves no trace
    assert 2 in rig.table


def test_fetch_twice_is_one_edge_and_unknown_is_refused(rig: Rig) -> None:
    assert not rig.table.begin_fetch(9)
    rig.table.offer(1, [1])
    assert rig.table.begin_fetch(1) and rig.table.begin_fetch(1)
    assert rig.table.edges[FETCH] == 1


STEPS = st.tuples(
    st.sampled_from(["offer", "begin_fetch", "acknowledge", "release", "expire", "wait"]),
    st.integers(0, 3),
    st.sampled_from([None, "me", "other"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_pages_are_freed_exactly_once(steps: list[tuple[str, int, str | None]]) -> None:
    rig = Rig()
    next_page = 0
    offered: set[int] = set()
    for name, key, incarnation in steps:
        if name == "wait":
            rig.clock.now += 3.0
        elif name == "expire":
            rig.table.expire()
        elif name == "offer":
            pages = [next_page, next_page + 1]
            next_page += 2
            if key in rig.table:
                with pytest.raises(HandoffConflict):
                    rig.table.offer(key, pages)
                continue
            rig.table.offer(key, pages)
            offered.update(pages)
        else:
            getattr(rig.table, name)(key, incarnation)
        assert max(rig.freed.values(), default=0) <= 1
        held = {page for handoff in rig.table._open.values() for page in handoff.pages}
        assert held | set(rig.freed) == offered and not held & set(rig.freed)
    rig.clock.now += TIMEOUT
    rig.table.expire()
    assert set(rig.freed) == offered and set(rig.freed.values()) <= {1}
    ends = sum(rig.table.count(state) for state in (HandoffState.DONE, HandoffState.RELEASED, HandoffState.EXPIRED))
    assert ends == rig.table.edges[OPENED] == len(rig.ended)
