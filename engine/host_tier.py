"""Host memory behind the KV pool: evicted blocks go there and are copied back when a prompt needs them.

A key is in one tier only. The host tier gives up its own blocks by the same rule as the pool.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Sequence

from engine.eviction import EvictionQueue

OFFLOAD_MIN_PRIORITY = 30
"""Blocks of lower retention priority are dropped at once: whoever set it expects no reuse."""


@dataclasses.dataclass(slots=True)
class Content:
    """What a findable block holds: the tokens of a full block behind the block `parent` (of the first one: the seed of
    its chain). `key` covers all of it."""

    key: bytes
    parent: bytes
    tokens: Sequence[int]
    priority: int


class HostTier:
    """`num_blocks` places. `copy_out(block, place)` saves a block of the pool, `copy_in(place, block)` restores it."""

    def __init__(
        self, num_blocks: int, copy_out: Callable[[int, int], None], copy_in: Callable[[int, int], None]
    ) -> None:
        self.num_blocks = num_blocks
        self.offloaded = 0
        self.onboarded = 0
        self._copy_out = copy_out
        self._copy_in = copy_in
        self._free = list(reversed(range(num_blocks)))
        self._queue = EvictionQueue()
        self._contents: dict[int, Content] = {}
        self._place_of: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"HostTier({len(self)}/{self.num_blocks})"

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def keys(self) -> list[bytes]:
        return list(self._place_of)

    def content(self, key: bytes) -> Content:
        return self._contents[self._place_of[key]]

    def save(self, block: int, content: Content) -> tuple[bool, Content | None]:
        """Whether the block was taken, and what had to go for it. A block that matters less than everything here is
        not taken."""
        if content.priority < OFFLOAD_MIN_PRIORITY:
            return False, None
        gone = None
        if not self._free:
            if not len(self._queue):
                return False, None
            if self._contents[self._queue.first()].priority > content.priority:
                return False, None
            gone = self._drop(self._queue.first())
        place = self._free.pop()
        self._copy_out(block, place)
        self._contents[place] = content
        self._place_of[content.key] = place
        self._queue.add(place, content.priority)
        self.offloaded += 1
        return True, gone

    def reserve(self, key: bytes) -> int:
        """Hold a block that is about to be brought back; nothing evicts it any more."""
        place = self._place_of.pop(key)
        self._queue.remove(place)
        return place

    def restore(self, place: int, block: int) -> Content:
        """Copy a reserved block back; its place is free then."""
        self._copy_in(place, block)
        self._free.append(place)
        self.onboarded += 1
        return self._contents.pop(place)

    def discard(self, key: bytes) -> None:
        """The pool has computed this block again."""
        if key in self._place_of:
            self._drop(self._place_of[key])

    def _drop(self, place: int) -> Content:
        content = self._contents.pop(place)
        del self._place_of[content.key]
        self._queue.remove(place)
        self._free.append(place)
        return content


def host_buffer(size: int, block_bytes: int, page: Callable[[int], memoryview]) -> HostTier | None:
    """A host tier of at most `size` bytes over blocks that are found in memory by `page`; None if not one fits."""
    count = size // block_bytes
    if count < 1:
        return None
    places = memoryview(mmap.mmap(-1, count * block_bytes))

    def place(index: int) -> memoryview:
        return places[index * block_bytes : (index + 1) * block_bytes]

    def copy_out(block: int, index: int) -> None:
        place(index)[:] = page(block)

    def copy_in(index: int, block: int) -> None:
        page(block)[:] = place(index)

    return HostTier(count, copy_out, copy_in)
