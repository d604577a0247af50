"""Which worker holds which KV block: block key → bit mask of worker slots, kept per worker incarnation.

A worker is *attached* with its incarnation; its event batches carry theirs, and those of another incarnation change
nothing. Detaching, or attaching a new incarnation, removes every trace of the old one.

A block with one owner shares that owner's mask object, so that an entry costs no integer of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvstore.protocol import KvEvent, KvEventBatch

if TYPE_CHECKING:
    from router.worker import Worker

MOST_OWNERS = 64  # of one depth, above which `match` tells of a few of them
FEW_OWNERS = 8
STRIDE = 16  # blocks


class StaleBatch(Exception):
    """The batch is of another incarnation."""


class SequenceGap(Exception):
    """Batches are missing before this one: the index no longer knows what the worker holds."""


class WorkerBlocks:
    """One incarnation's blocks. `expected` is the sequence number of the next batch, None before a snapshot.

    `keys` includes `predicted`, blocks that a routed prompt will make; `host` are those in the worker's host memory.
    """

    __slots__ = ("bit", "expected", "host", "incarnation", "keys", "owner", "predicted", "slot", "unconfirmed")

    def __init__(self, incarnation: str, slot: int, owner: Worker | None = None) -> None:
        self.incarnation = incarnation
        self.slot = slot
        self.bit = 1 << slot
        self.owner = owner
        self.expected: int | None = None
        self.keys: set[bytes] = set()
        self.host: set[bytes] = set()
        self.predicted: set[bytes] = set()
        self.unconfirmed: set[bytes] = set()  # predicted before the last `expire_predictions`

    def __repr__(self) -> str:
        return f"<WorkerBlocks {self.incarnation} blocks={len(self.keys)} expected={self.expected}>"


class BlockIndex:
    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}
        self._attached: list[WorkerBlocks | None] = []  # by slot
        self._free: list[int] = []
        self._turn = 0
        self.expired_predictions = 0  # blocks that a worker was to make and never told of

    def __repr__(self) -> str:
        attached = sum(blocks is not None for blocks in self._attached)
        return f"<BlockIndex blocks={len(self._owners)} workers={attached}>"

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._owners)

    def attach(self, incarnation: str, owner: Worker | None = None) -> WorkerBlocks:
        """A slot for a worker's new incarnation, empty."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = len(self._attached)
            self._attached.append(None)
        blocks = self._attached[slot] = WorkerBlocks(incarnation, slot, owner)
        return blocks

    def detach(self, blocks: WorkerBlocks) -> None:
        """Forget everything about it; what still arrives for it is refused. Idempotent."""
        if self._attached[blocks.slot] is blocks:
            self._clear(blocks)
            self._attached[blocks.slot] = None
            heapq.heappush(self._free, blocks.slot)

    def owner(self, slot: int) -> Worker | None:
        blocks = self._attached[slot]
        return None if blocks is None else blocks.owner

    # ------------------------------------------------------------ what workers tell

    def apply(self, blocks: WorkerBlocks, batch: KvEventBatch) -> None:
        """Raises StaleBatch or SequenceGap, and then changes nothing."""
        if self._attached[blocks.slot] is not blocks or batch.incarnation != blocks.incarnation:
            raise StaleBatch(f"batch of incarnation {batch.incarnation}, the worker's is {blocks.incarnation}")
        opens = bool(batch.events) and batch.events[0].cleared
        if batch.seq != blocks.expected and not (opens and blocks.expected is None):
            raise SequenceGap(f"batch {batch.seq}, expected {blocks.expected or 'a snapshot'}")
        blocks.expected = batch.seq + 1
        for event in batch.events:
            self._apply_event(blocks, event)

    def _apply_event(self, blocks: WorkerBlocks, event: KvEvent) -> None:
        if event.cleared:
            self._clear(blocks)
        if event.removed:
            self._remove(blocks, event.removed)
        if event.stored:
            self._confirm(blocks, event.stored)
            self.add(blocks, event.stored)
        if event.moved:
            if event.level:
                blocks.host.update(blocks.keys.intersection(event.moved))
            else:
                blocks.host.difference_update(event.moved)

    @staticmethod
    def _confirm(blocks: WorkerBlocks, keys: Collection[bytes]) -> None:
        if blocks.predicted:
            blocks.predicted.difference_update(keys)
        if blocks.unconfirmed:
            blocks.unconfirmed.difference_update(keys)
        if blocks.host:
            blocks.host.difference_update(keys)

    def restart(self, blocks: WorkerBlocks) -> None:
        """The stream broke: the next batch must be a snapshot. What is known stays until then."""
        blocks.expected = None

    def add(self, blocks: WorkerBlocks, keys: Collection[bytes]) -> None:
        """Blocks that the worker stored, or is about to store because a request was routed to it."""
        if self._attached[blocks.slot] is not blocks:
            return
        bit, owners = blocks.bit, self._owners
        setdefault = owners.setdefault
        blocks.keys.update(keys)
        for key in keys:
            mask = setdefault(key, bit)
            if mask is not bit:
                owners[key] = mask | bit

    # ------------------------------------------------------------ what routing expects

    def predict(self, blocks: WorkerBlocks, keys: Sequence[bytes]) -> None:
        """A prompt is on its way to the worker: its blocks count until events tell, or `expire_predictions` comes."""
        new = [key for key in keys if key not in blocks.keys]
        if new:
            blocks.predicted.update(new)
            self.add(blocks, new)

    def withdraw(self, blocks: WorkerBlocks, keys: Iterable[bytes]) -> None:
        """The prompt was not computed there after all. What events have confirmed stays."""
        if blocks.predicted or blocks.unconfirmed:
            self._remove(blocks, [key for key in keys if key in blocks.predicted or key in blocks.unconfirmed])

    def expire_predictions(self, blocks: WorkerBlocks) -> int:
        """To be called now and then: what was predicted before the last call, and never told of, is forgotten.

        Returns how many blocks that were.
        """
        expired = len(blocks.unconfirmed)
        if expired:
            self.expired_predictions += expired
            self._remove(blocks, list(blocks.unconfirmed))
        blocks.unconfirmed, blocks.predicted = blocks.predicted, blocks.unconfirmed
        return expired

    # ------------------------------------------------------------ lookup

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """By worker slot: how many blocks from the start it holds without a gap. Workers with none are absent.

        Where more than MOST_OWNERS workers hold exactly as many, a few of them stand for all, others on each call.
        """
        matched: dict[int, int] = {}
        alive = self._owners.get(keys[0]) if keys else None
        if alive is None:
            return matched
        if alive.bit_count() == 1:
            return {alive.bit_length() - 1: self._run(keys, 1, alive)}
        for depth, owners in enumerate(map(self._owners.get, keys)):
            if owners is alive or owners == alive:
                continue
            left = 0 if owners is None else alive & owners
            if left == alive:
                continue
            self._spread(alive ^ left, depth, matched)
            if not left:
                return matched
            if left.bit_count() == 1:
                matched[left.bit_length() - 1] = self._run(keys, depth + 1, left)
                return matched
            alive = left
        self._spread(alive, len(keys), matched)
        return matched

    def _run(self, keys: Sequence[bytes], start: int, bit: int) -> int:
        """Length of the run of blocks that one worker holds, of which the first `start` are known.

        It leaps: workers give up a chain from its end, so a block that is held tells of the STRIDE - 1 before it. Where
        a worker does otherwise (by priorities) the prediction is too long, never the answer wrong.
        """
        get, end = self._owners.get, start
        while end + STRIDE <= len(keys) and get(keys[end + STRIDE - 1], 0) & bit:
            end += STRIDE
        for key in keys[end : end + STRIDE]:
            if not get(key, 0) & bit:
                break
            end += 1
        return end

    def _spread(self, mask: int, depth: int, matched: dict[int, int]) -> None:
        if mask.bit_count() > MOST_OWNERS:
            self._turn += 1
            for slot in some_bits(mask, FEW_OWNERS, self._turn):
                matched[slot] = depth
            return
        while mask:
            bit = mask & -mask
            matched[bit.bit_length() - 1] = depth
            mask ^= bit

    # ------------------------------------------------------------ removal

    def _remove(self, blocks: WorkerBlocks, keys: Collection[bytes]) -> None:
        owners, bit, held = self._owners, blocks.bit, blocks.keys
        for key in keys:
            if key not in held:
                continue
            held.discard(key)
            mask = owners[key]
            if mask is bit or mask == bit:
                del owners[key]
            else:
                owners[key] = self._shared(mask ^ bit)
        for others in (blocks.host, blocks.predicted, blocks.unconfirmed):
            if others:
                others.difference_update(keys)

    def _shared(self, mask: int) -> int:
        """The only owner's own mask object, if there is one owner."""
        if mask.bit_count() == 1:
            only = self._attached[mask.bit_length() - 1]
            if only is not None:
                return only.bit
        return mask

    def _clear(self, blocks: WorkerBlocks) -> None:
        self._remove(blocks, list(blocks.keys))


def some_bits(mask: int, count: int, turn: int) -> list[int]:
    """Places of `count` of the set bits of a mask that has many more, others for each `turn`."""
    start = turn * 2654435761 % mask.bit_length()  # Knuth's multiplicative hash: far apart for neighbouring turns
    window = mask >> start
    places: list[int] = []
    while len(places) < count:
        if not window:
            start, window = 0, mask
        step = (window & -window).bit_length()
        start += step
        places.append(start - 1)
        window >>= step
    return places
