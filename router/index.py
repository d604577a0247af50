"""Which worker holds which KV block: block key → bit mask of worker slots, kept per worker incarnation.

A worker is *attached* with its incarnation; its event batches carry theirs, and those of another incarnation change
nothing. Detaching, or attaching a new incarnation, removes every trace of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.protocol import KvEventBatch


class StaleBatch(Exception):
    """The batch is of another incarnation."""


class SequenceGap(Exception):
    """Batches are missing before this one: the index no longer knows what the worker holds."""


class WorkerBlocks:
    """One incarnation's blocks. `expected` is the sequence number of the next batch, None before a snapshot."""

    __slots__ = ("bit", "expected", "incarnation", "keys")

    def __init__(self, incarnation: str, bit: int) -> None:
        self.incarnation = incarnation
        self.bit = bit
        self.expected: int | None = None
        self.keys: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<WorkerBlocks {self.incarnation} blocks={len(self.keys)} expected={self.expected}>"


class BlockIndex:
    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}
        self._attached: dict[int, WorkerBlocks] = {}  # by bit

    def __repr__(self) -> str:
        return f"<BlockIndex blocks={len(self._owners)} workers={len(self._attached)}>"

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._owners)

    def attach(self, incarnation: str) -> WorkerBlocks:
        """A slot for a worker's new incarnation, empty."""
        bit = 1
        while bit in self._attached:
            bit <<= 1
        blocks = self._attached[bit] = WorkerBlocks(incarnation, bit)
        return blocks

    def detach(self, blocks: WorkerBlocks) -> None:
        """Forget everything about it; what still arrives for it is refused. Idempotent."""
        if self._attached.get(blocks.bit) is blocks:
            self._clear(blocks)
            del self._attached[blocks.bit]

    def apply(self, blocks: WorkerBlocks, batch: KvEventBatch) -> None:
        """Raises StaleBatch or SequenceGap, and then changes nothing."""
        if self._attached.get(blocks.bit) is not blocks or batch.incarnation != blocks.incarnation:
            raise StaleBatch(f"batch of incarnation {batch.incarnation}, the worker's is {blocks.incarnation}")
        opens = bool(batch.events) and batch.events[0].cleared
        if batch.seq != blocks.expected and not (opens and blocks.expected is None):
            raise SequenceGap(f"batch {batch.seq}, expected {blocks.expected or 'a snapshot'}")
        blocks.expected = batch.seq + 1
        for event in batch.events:
            if event.cleared:
                self._clear(blocks)
            self._remove(blocks, event.removed)
            self.add(blocks, event.stored)

    def restart(self, blocks: WorkerBlocks) -> None:
        """The stream broke: the next batch must be a snapshot. What is known stays until then."""
        blocks.expected = None

    def add(self, blocks: WorkerBlocks, keys: Iterable[bytes]) -> None:
        """Blocks that the worker stored, or is about to store because a request was routed to it."""
        if self._attached.get(blocks.bit) is not blocks:
            return
        owners, bit = self._owners, blocks.bit
        for key in keys:
            blocks.keys.add(key)
            owners[key] = owners.get(key, 0) | bit

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """By worker bit: how many blocks from the start it holds without a gap. Workers with none are absent."""
        matched: dict[int, int] = {}
        get, depth, alive = self._owners.get, 0, 0
        for depth, key in enumerate(keys):
            owners = get(key, 0)
            if depth == 0:
                alive = owners
            dropped = alive & ~owners
            if dropped:
                _spread(dropped, depth, matched)
                alive &= owners
            if not alive:
                return matched
        if alive:
            _spread(alive, depth + 1, matched)
        return matched

    def _remove(self, blocks: WorkerBlocks, keys: Iterable[bytes]) -> None:
        owners, bit = self._owners, blocks.bit
        for key in keys:
            if key not in blocks.keys:
                continue
            blocks.keys.discard(key)
            left = owners[key] & ~bit
            if left:
                owners[key] = left
            else:
                del owners[key]

    def _clear(self, blocks: WorkerBlocks) -> None:
        self._remove(blocks, list(blocks.keys))


def _spread(mask: int, depth: int, matched: dict[int, int]) -> None:
    while mask:
        bit = mask & -mask
        matched[bit] = depth
        mask ^= bit
