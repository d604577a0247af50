"""What all one-sided reads of another worker's pool have in common: which bytes, and how to know that they are right.

The blocks are read first. When all of them are here, the pool's header and the generations of those blocks are read:
an unchanged generation then says that the block had the offered owner until after it was read, and the header that it
was this pool at all and not something that a later process keeps at the same address.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore.errors import StaleBlock, TransferError
from kvstore.handoff import RemoteMemory
from kvstore.transceivers.base import Pages
from kvstore.transceivers.shm import HEADER_SIZE, TABLE_OFFSET, PoolLayout, parse_header

Piece = tuple[int, int, int]
"""(offset in the local mapping or scratch, offset in the remote mapping, bytes)"""

MAX_BLOCKS = 256  # of one read and its verification
_GAP = 64  # entries of the table between two wanted ones that are read along rather than skipped
_TABLE_START = -(-HEADER_SIZE // 64) * 64
SCRATCH_SIZE = _TABLE_START + 8 * MAX_BLOCKS * (_GAP + 1)


def layout_of(remote: RemoteMemory, pages: Pages) -> PoolLayout:
    """TransferError for a pool that this worker's blocks cannot take bytes from."""
    if remote.num_blocks < 1 or remote.base < 1:
        raise TransferError(f"a pool of {remote.num_blocks} blocks at {remote.base:#x}")
    if remote.block_bytes != pages.block_bytes:
        raise TransferError(f"blocks of {remote.block_bytes} bytes there, of {pages.block_bytes} here")
    return PoolLayout(remote.num_blocks, remote.block_bytes)


def block_pieces(layout: PoolLayout, ids: Sequence[int], pages: Pages, blocks: Sequence[int]) -> list[Piece]:
    """Runs that are contiguous on both sides are one piece."""
    pieces: list[Piece] = []
    started = (-1, -1)  # numbers of the first blocks of a run, theirs and ours
    length = 0
    for theirs, ours in zip(ids, blocks, strict=True):
        if not 0 <= theirs < layout.num_blocks:
            raise TransferError(f"block {theirs} of a pool of {layout.num_blocks}")
        if length and theirs - started[0] == length == ours - started[1]:
            length += 1
            continue
        if length:
            pieces.append(_piece(layout, pages, started, length))
        started, length = (theirs, ours), 1
    if length:
        pieces.append(_piece(layout, pages, started, length))
    return pieces


def _piece(layout: PoolLayout, pages: Pages, first: tuple[int, int], length: int) -> Piece:
    return pages.offset(first[1]), layout.offset(first[0]), length * layout.block_bytes


class Verification:
    """The second read, into a scratch buffer of SCRATCH_SIZE bytes."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._places: dict[int, int] = {}
        self.pieces: list[Piece] = [(0, 0, HEADER_SIZE)]
        place = _TABLE_START
        wanted = sorted(set(ids))
        starts = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(wanted), 1) if b - a > _GAP), len(wanted)]
        for start, end in itertools.pairwise(starts):
            run = wanted[start:end]
            length = 8 * (run[-1] - run[0] + 1)
            self.pieces.append((place, TABLE_OFFSET + 8 * run[0], length))
            self._places |= {block: place + 8 * (block - run[0]) for block in run}
            place += length

    def check(
        self, scratch: memoryview, incarnation: str, layout: PoolLayout, ids: Sequence[int], generations: Sequence[int]
    ) -> None:
        """StaleBlock, or TransferError when it is another pool."""
        try:
            found, name = parse_header(bytes(scratch[:HEADER_SIZE]))
        except ValueError as error:
            raise TransferError(f"what was read is no block pool: {error}") from None
        if (found, name) != (layout, incarnation):
            raise TransferError(f"what was read is the pool of {name} ({found}), not of {incarnation} ({layout})")
        for block, generation in zip(ids, generations, strict=True):
            place = self._places[block]
            current = int.from_bytes(scratch[place : place + 8], "little")
            if current != generation:
                raise StaleBlock(f"block {block} was offered at generation {generation} and is at {current}")
