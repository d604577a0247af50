"""Writes blocks to the pool: straight into segments of this host, else through the agent's staging slots.

Mapped: reserve (the master gives room, anywhere in the pool) ─► fill in place ─► settle. Chosen as long as every place
that the master gives lies on this host; a place elsewhere is given back, its block goes through a slot, and so do the
following ones for a while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mooncake_pool import wire
from mooncake_pool.access import Access
from mooncake_pool.blockstore import write_value
from mooncake_pool.client import Outcome, Place
from mooncake_pool.link import AgentLink, Lane, Slots
from mooncake_pool.mapping import MASTER_FORGETS

FILL_SECONDS = 2.0
"""A place must be filled within this time of its reservation, well before the master may give it to another."""
_CAUSES = {
    Outcome.MISS: "puts_evicted",
    Outcome.NO_SPACE: "puts_no_space",
    Outcome.TRANSFER_FAILED: "puts_failed",
    Outcome.MASTER_GONE: "puts_master_gone",
    Outcome.REFUSED: "puts_refused",
}


class Writer:
    def __init__(self, access: Access) -> None:
        self._access = access
        self._unmapped_until = 0.0  # staging is used until then
        self._staging_paused_until = 0.0  # a holder did not take blocks

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        stored = 0
        rest: list[int] = []
        if time.monotonic() >= self._unmapped_until:
            stored, rest = self._put_mapped(keys, blocks, deadline)
        else:
            rest = list(range(len(keys)))
        if rest:
            stored += self._put_staged(rest, keys, blocks, deadline)
        self._access.count(blocks_stored=stored, blocks_not_stored=len(keys) - stored)
        return stored

    # ---------------------------------------------------------------- mapped

    def _put_mapped(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float
    ) -> tuple[int, list[int]]:
        """How many are stored, and the indices of those that have to go another way."""
        stored = 0
        elsewhere: list[int] = []
        for link, call, start, reply in self._access.answers(Lane.WRITE, keys, wire.Reserve, deadline, _give_back):
            end = start + len(reply.outcomes)
            stored += sum(
                self._not_reserved(outcome)
                for outcome, place in zip(reply.outcomes, reply.places, strict=True)
                if place is None
            )
            filled, unfilled, unmapped = self._fill_part(reply.places, keys[start:end], blocks[start:end], deadline)
            link.tell(wire.Settle(call, [keys[start + i] for i in (*unfilled, *unmapped)]))
            link.activity.put(filled, self._access.value_bytes)
            self._access.count(blocks_written_mapped=len(filled), calls_late=int(bool(unfilled)))
            stored += len(filled)
            if unmapped:
                self._unmapped_until = time.monotonic() + MASTER_FORGETS
                elsewhere = [start + i for i in unmapped] + list(range(end, len(keys)))
                break
        return stored, elsewhere

    def _fill_part(
        self, places: Sequence[Place | None], keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float
    ) -> tuple[list[str], list[int], list[int]]:
        """Endpoints of the places that were filled; indices of those that were not in time, and of those elsewhere."""
        last = min(deadline, time.monotonic() + FILL_SECONDS)
        targets: list[tuple[int, memoryview, str]] = []
        unmapped: list[int] = []
        for i, place in enumerate(places):
            if place is not None:
                segment = self._access.maps.find(place.endpoint, to_write=True)
                value = segment.value(place) if segment is not None else None
                if value is None or len(value) != self._access.value_bytes:
                    unmapped.append(i)
                else:
                    targets.append((i, value, place.endpoint))

        def fill(number: int) -> bool:
            i, value, _ = targets[number]
            if time.monotonic() > last:
                return False
            write_value(value, blocks[i], keys[i], self._access.scope)
            return True

        done = self._access.in_two(fill, len(targets))
        filled = [endpoint for (_, _, endpoint), ok in zip(targets, done, strict=True) if ok]
        return filled, [i for (i, _, _), ok in zip(targets, done, strict=True) if not ok], unmapped

    def _not_reserved(self, outcome: int) -> int:
        """1 for a block that somebody has stored already."""
        if outcome == Outcome.PRESENT:
            self._access.count(blocks_present=1)
            return 1
        self._count_cause(outcome)
        return 0

    # ---------------------------------------------------------------- staged

    def _put_staged(
        self, indices: list[int], keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float
    ) -> int:
        stored = 0
        if time.monotonic() < self._staging_paused_until:
            self._access.count(puts_paused=len(indices))
            return 0
        for first in range(0, len(indices), self._access.batch):
            part = indices[first : first + self._access.batch]
            present = self._present([keys[i] for i in part], deadline)
            if present is None:
                break
            there = present.count(Outcome.OK)
            self._access.count(blocks_present=there)
            missing = [i for i, outcome in zip(part, present, strict=True) if outcome != Outcome.OK]
            stored += there + self._put_missing(missing, keys, blocks, deadline)
        return stored

    def _present(self, keys: list[bytes], deadline: float) -> list[int] | None:
        """An Outcome for each key; None when there is no answer."""
        link = self._access.usable(Lane.WRITE)
        if link is None:
            return None
        reply = link.call(Lane.WRITE, lambda call: wire.Contains(call, keys, before_put=True), deadline)
        if reply is None:
            self._access.late()
            return None
        return None if Outcome.MASTER_GONE in reply.outcomes else reply.outcomes

    def _put_missing(
        self, missing: list[int], keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float
    ) -> int:
        stored = 0
        while missing:
            link = self._access.usable(Lane.WRITE)
            if link is None:
                break
            with link.slots(Lane.WRITE, len(missing), deadline) as held:
                now, missing = missing[: len(held)], missing[len(held) :]
                if not now:
                    self._access.count(calls_late=1)
                    break
                for index, slot in zip(now, held.numbers, strict=True):
                    write_value(link.staging.value(slot), blocks[index], keys[index], self._access.scope)
                reply = _send_put(link, [keys[index] for index in now], held, deadline)
            if reply is None:
                self._access.late()
                break
            stored += self._note_put(link, reply)
            if Outcome.TRANSFER_FAILED in reply.outcomes:
                self._staging_paused_until = time.monotonic() + MASTER_FORGETS
                break
        return stored

    def _note_put(self, link: AgentLink, reply: wire.Reply) -> int:
        for outcome in reply.outcomes:
            self._count_cause(outcome)
        link.activity.put([p.endpoint for p in reply.places if p is not None], self._access.value_bytes)
        return reply.outcomes.count(Outcome.OK)

    def _count_cause(self, outcome: int) -> None:
        cause = _CAUSES.get(Outcome(outcome))
        if cause is not None:
            self._access.count(**{cause: 1})


def _send_put(link: AgentLink, keys: list[bytes], held: Slots, deadline: float) -> wire.Reply | None:
    return link.call(Lane.WRITE, lambda call: wire.Put(call, keys, held.numbers), deadline, held)


def _give_back(link: AgentLink, call: int, keys: list[bytes]) -> None:
    link.tell(wire.Settle(call, keys))
