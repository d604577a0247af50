"""Reads blocks from the pool: straight out of segments of this host, else through the agent's staging slots."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from mooncake_pool import wire
from mooncake_pool.access import Access, leading_ok
from mooncake_pool.blockstore import read_value
from mooncake_pool.client import Outcome, Place
from mooncake_pool.link import AgentLink, Lane
from mooncake_pool.mapping import MASTER_FORGETS, SegmentMap

log = logging.getLogger("mooncake_pool")

DOUBT_SECONDS = 2.0
"""A value that is still not what it should be after this time was never finished, and is forgotten."""
_MOST_DOUBTS = 4096


class Reader:
    def __init__(self, access: Access) -> None:
        self._access = access
        self._failing: dict[str, float] = {}  # endpoint of a holder: until when it is not asked
        self._doubts: dict[bytes, float] = {}  # when a value was found invalid first
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes], deadline: float) -> int:
        done = 0
        for _, _, start, reply in self._access.answers(Lane.READ, keys, wire.Contains, deadline):
            if Outcome.MASTER_GONE in reply.outcomes:
                self._access.count(calls_master_gone=1)
                break
            run = leading_ok(reply.outcomes)
            done = start + run
            if run < len(reply.outcomes):
                break
        self._access.count(lookups=1, lookup_keys=len(keys), lookup_hits=done)
        return done

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        done = 0
        for link, _, start, reply in self._access.answers(Lane.READ, keys, wire.Locate, deadline):
            end = start + len(reply.places)
            run = self._read_part(link, keys[start:end], into[start:end], reply.places, deadline)
            done = start + run
            if done < end:
                break
        self._access.count(blocks_read=done, blocks_not_read=len(keys) - done)
        return done

    def _read_part(
        self,
        link: AgentLink,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        places: Sequence[Place | None],
        deadline: float,
    ) -> int:
        """Length of the leading run that was read."""
        done = 0
        while done < len(keys):
            place = places[done]
            if place is None:
                self._access.count(misses=1)
                break
            if place.size != self._access.value_bytes:
                self._invalid(link, keys[done], "has the size of no block of this store")
                break
            values = self._mapped_run(places[done:])
            if values:
                count = len(values)
                run = self._read_mapped(link, keys[done:], into[done:], places[done:], values, deadline)
            else:
                count = _run_of_one_holder(places[done:])
                run = self._read_staged(link, keys[done : done + count], into[done:], place.endpoint, deadline)
            done += run
            if run < count:
                break
        return done

    def _mapped_run(self, places: Sequence[Place | None]) -> list[memoryview]:
        """The values of the places that come first and lie in segments of this host."""
        maps: dict[str, SegmentMap | None] = {}
        values: list[memoryview] = []
        for place in places:
            if place is None or place.size != self._access.value_bytes:
                break
            if place.endpoint not in maps:
                maps[place.endpoint] = self._access.maps.find(place.endpoint)
            segment = maps[place.endpoint]
            value = segment.value(place) if segment is not None else None
            if value is None:
                break
            values.append(value)
        return values

    def _read_mapped(
        self,
        link: AgentLink,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        places: Sequence[Place | None],
        values: Sequence[memoryview],
        deadline: float,
    ) -> int:
        def read(i: int) -> bool:
            return time.monotonic() < deadline and read_value(values[i], into[i], keys[i], self._access.scope)

        outcomes = self._access.in_two(read, len(values))
        run = outcomes.index(False) if False in outcomes else len(outcomes)
        self._access.count(blocks_read_mapped=run)
        link.activity.got([p.endpoint for p in places[:run] if p is not None], self._access.value_bytes)
        if run < len(outcomes):
            if time.monotonic() >= deadline:
                self._access.count(calls_late=1)
            else:
                self._invalid(link, keys[run], "failed verification")
        return run

    def _read_staged(
        self,
        link: AgentLink,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        holder: str,
        deadline: float,
    ) -> int:
        """As `_read_part`, for blocks that one holder has; through as many slots as there are, again and again."""
        done = 0
        while done < len(keys):
            if time.monotonic() < self._failing.get(holder, 0.0):
                self._access.count(reads_of_failing_holder=1)
                break
            with link.slots(Lane.READ, len(keys) - done, deadline) as held:
                part = keys[done : done + len(held)]
                if not held:
                    self._access.count(calls_late=1)
                    break
                reply = link.call(Lane.READ, _get_into(part, held.numbers), deadline, held)
                if reply is None:
                    self._access.late()
                    break
                run = self._take_staged(link, part, into[done:], reply, held.numbers, holder)
            done += run
            if run < len(part):
                break
        return done

    def _take_staged(
        self,
        link: AgentLink,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        reply: wire.Reply,
        slots: Sequence[int],
        holder: str,
    ) -> int:
        for i, key in enumerate(keys):
            outcome = reply.outcomes[i]
            if outcome != Outcome.OK:
                self._note_failure(outcome, holder)
                return i
            value = link.staging.value(slots[i])
            if reply.lengths[i] != len(value) or not read_value(value, into[i], key, self._access.scope):
                self._invalid(link, key, "failed verification")
                return i
            link.activity.got((holder,), self._access.value_bytes)
        return len(keys)

    def _note_failure(self, outcome: int, holder: str) -> None:
        match outcome:
            case Outcome.TRANSFER_FAILED:
                # Each further read would wait a second until the master forgets the holder.
                self._failing[holder] = time.monotonic() + MASTER_FORGETS
                self._access.count(reads_failed=1)
                log.warning("pool holder %s does not answer; its blocks count as missing for a while", holder)
            case Outcome.MASTER_GONE:
                self._access.count(calls_master_gone=1)
            case _:
                self._access.count(misses=1)

    def _invalid(self, link: AgentLink, key: bytes, said: str) -> None:
        """A value that its writer is still filling looks the same; only one that stays so is forgotten."""
        self._access.count(blocks_invalid=1)
        now = time.monotonic()
        with self._lock:
            since = self._doubts.setdefault(key, now)
            forget = now - since >= DOUBT_SECONDS
            if forget or len(self._doubts) > _MOST_DOUBTS:
                self._doubts.pop(key if forget else next(iter(self._doubts)))
        if forget:
            self._access.count(blocks_forgotten=1)
            log.warning("pool block %s %s and is removed", key.hex(), said)
            link.tell(wire.Forget([key]))


def _get_into(keys: Sequence[bytes], slots: list[int]) -> wire.MakeMessage:
    return lambda call: wire.Get(call, list(keys), slots)


def _run_of_one_holder(places: Sequence[Place | None]) -> int:
    """How many places have the holder and size of the first."""
    first = places[0]
    assert first is not None
    for i, place in enumerate(places):
        if place is None or (place.endpoint, place.size) != (first.endpoint, first.size):
            return i
    return len(places)
