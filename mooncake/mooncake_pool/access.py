"""What the reads and writes of one pool client share: the agent of the moment, sizes, mapped segments, counters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.transceivers.copying import Copiers
from mooncake_pool import wire
from mooncake_pool.blockstore import TRAILER_BYTES
from mooncake_pool.client import Outcome
from mooncake_pool.link import AgentLink, Call, Lane
from mooncake_pool.mapping import SegmentMaps

_LANE_ROLES = {Lane.READ: ("both", "consumer"), Lane.WRITE: ("both", "producer")}
_FIRST_KEYS = {Lane.READ: 64, Lane.WRITE: 16}
_GROWTH = 4
"""Keys of the first question; each next one has so many times more, up to the batch, and is asked while the blocks of
the one before are copied. To find a block takes a fraction of what it takes to make room for one."""
_WORTH_SHARING = 1024 * 1024
"""Bytes that are worth a second thread."""


class Access:
    def __init__(self, role: str, block_bytes: int, batch: int, changed: Callable[[], None]) -> None:
        """`changed` is called when an answer was late."""
        self.block_bytes = block_bytes
        self.value_bytes = block_bytes + TRAILER_BYTES
        self.batch = batch
        self.scope = 0
        self.maps = SegmentMaps()
        self.link: AgentLink | None = None
        self.reason: str | None = "starting"
        self._role = role
        self._changed = changed
        self._totals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._copiers = Copiers(_WORTH_SHARING)

    def usable(self, lane: Lane) -> AgentLink | None:
        """The agent, if the role has this lane, the pool is up and the lane is not busy with a call that was late."""
        if self._role not in _LANE_ROLES[lane]:
            return None
        link = self.link
        if link is None or self.reason is not None or link.overdue(lane):
            self.count(calls_refused=1)
            return None
        return link

    def late(self) -> None:
        self.count(calls_late=1)
        self._changed()

    def count(self, **more: int) -> None:
        link = self.link
        if link is not None:
            link.activity.count(**more)
        with self._lock:
            self._totals.update(more)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def answers(
        self,
        lane: Lane,
        keys: Sequence[bytes],
        make: Callable[[int, list[bytes]], wire.ToAgent],
        deadline: float,
        unused: Callable[[AgentLink, int, list[bytes]], None] | None = None,
    ) -> Iterator[tuple[AgentLink, int, int, wire.Reply]]:
        """Asks about all keys, the next part while the caller works on one: (agent, call number, start, answer).

        Ends early when there is no answer. `unused` gets a call whose answer nobody will look at.
        """
        parts = _parts(len(keys), _FIRST_KEYS[lane], self.batch)
        waiting: tuple[AgentLink, Call, range] | None = None
        try:
            waiting = self._ask(lane, keys, next(parts, None), make)
            while waiting is not None:
                link, call, part = waiting
                reply = link.finish(call, deadline)
                if reply is None:
                    self.late()
                    return
                waiting = self._ask(lane, keys, next(parts, None), make)
                yield link, call.number, part.start, reply
        finally:
            if waiting is not None and unused is not None:
                link, call, part = waiting
                unused(link, call.number, list(keys[part.start : part.stop]))

    def in_two(self, work: Callable[[int], bool], count: int) -> list[bool]:
        """`work` of 0 .. count-1, each on a block: by two threads when that is worth it."""
        done = [False] * count

        def note(i: int) -> None:
            done[i] = work(i)

        self._copiers.each(note, count, self.block_bytes)
        return done

    def close(self) -> None:
        self.maps.close()
        self._copiers.close()

    def _ask(
        self,
        lane: Lane,
        keys: Sequence[bytes],
        part: range | None,
        make: Callable[[int, list[bytes]], wire.ToAgent],
    ) -> tuple[AgentLink, Call, range] | None:
        link = self.usable(lane) if part is not None else None
        if link is None or part is None:
            return None
        asked = list(keys[part.start : part.stop])
        call = link.begin(lane, lambda number: make(number, asked))
        return None if call is None else (link, call, part)


def _parts(count: int, first: int, most: int) -> Iterator[range]:
    start, size = 0, first
    while start < count:
        stop = min(count, start + min(size, most))
        yield range(start, stop)
        start, size = stop, _GROWTH * size


def leading_ok(outcomes: Sequence[int]) -> int:
    """How many OK stand first."""
    for i, outcome in enumerate(outcomes):
        if outcome != Outcome.OK:
            return i
    return len(outcomes)
