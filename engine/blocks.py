"""Who owns each KV block, and which blocks hold which prefix. No torch, no bytes: block numbers only.

    free ──allocate──► used ──release──► reusable (it has a key) or free (it has none)
                        ▲                   │
                        └───── acquire ─────┤
                        └──── allocate ◄────┘ evicted, least recently used first

A block is *used* while a request refers to it, *pinned* while only a hand-off, a fetch or a put does, *reusable* while
nobody does but its content is findable, and *free* otherwise; the four counts always sum to the total.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from kvstore.protocol import KvEvent


def _nothing(_block: int) -> None:
    pass


class BlockPool:
    """Blocks 0 .. num_blocks-1 of one worker.

    `on_new_owner(block)` is called for every allocated block, before anything is written to it. With `reuse` off no
    block is ever findable. Blocks are allocated against a reservation only, so that a request that was admitted never
    waits for a block: `available` minus `reserved` is what new requests may still claim.
    """

    def __init__(self, num_blocks: int, reuse: bool = True, on_new_owner: Callable[[int], None] = _nothing) -> None:
        self.num_blocks = num_blocks
        self.reserved = 0
        self.evicted = 0
        self._reuse = reuse
        self._on_new_owner = on_new_owner
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._used = 0
        self._pinned = 0
        self._events: list[KvEvent] = []

    def __repr__(self) -> str:
        return (
            f"BlockPool(used {self.used}, pinned {self.pinned}, reusable {self.reusable}, free {self.free}, "
            f"reserved {self.reserved}, total {self.num_blocks})"
        )

    @property
    def used(self) -> int:
        return self._used

    @property
    def pinned(self) -> int:
        return self._pinned

    @property
    def reusable(self) -> int:
        return len(self._reusable)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._reusable)

    # ------------------------------------------------------------ reservation

    def can_reserve(self, new_blocks: int, cached: Sequence[int] = ()) -> bool:
        """Whether `new_blocks` can be reserved after the blocks `cached` have been acquired."""
        revived = sum(block in self._reusable for block in cached)
        return new_blocks + revived <= self.available - self.reserved

    def reserve(self, count: int) -> None:
        if not self.can_reserve(count):
            raise RuntimeError(f"reserving {count} of {self!r}")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    # ------------------------------------------------------------ ownership

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content with one reference each, out of the reservation."""
        if count > self.reserved:
            raise RuntimeError(f"allocating {count} blocks beyond the reservation of {self!r}")
        self.reserved -= count
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._on_new_owner(block)
        self._used += count
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that are in use or findable."""
        for block in blocks:
            if not self._refs[block]:
                self._leave_idle(block)
                self._used += 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a sequence. The last block is the first to be evicted: a prefix is of use
        without its continuation, and not the other way round."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise RuntimeError(f"block {block} is released without a reference")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._used -= 1
                self._become_idle(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep blocks that are in use from being freed when their requests end."""
        for block in blocks:
            if not self._refs[block] and not self._pins[block]:
                raise RuntimeError(f"block {block} is pinned without an owner")
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self._pins[block] < 1:
                raise RuntimeError(f"block {block} is unpinned without a pin")
            self._pins[block] -= 1
            if not self._pins[block] and not self._refs[block]:
                self._pinned -= 1
                self._park(block)

    def check_writable(self, block: int) -> None:
        """A write to a block that somebody else reads would change that one's answer."""
        if self._refs[block] != 1 or self._pins[block] or self._key_of[block] is not None:
            raise RuntimeError(
                f"write to block {block} with {self._refs[block]} references, {self._pins[block]} pins, "
                f"{'a' if self._key_of[block] else 'no'} key"
            )

    # ------------------------------------------------------------ prefix cache

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the leading keys that are here: a block behind a gap is of no use."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: int, key: bytes) -> bool:
        """Make a full block findable. False if another block has that key already; this one then stays private."""
        if not self._reuse or key in self._block_of:
            return False
        self._key_of[block] = key
        self._block_of[key] = block
        if self._events and not self._events[-1].removed:
            self._events[-1].stored.append(key)
        else:
            self._events.append(KvEvent(stored=[key]))
        return True

    def resident_keys(self) -> list[bytes]:
        return list(self._block_of)

    def drain_events(self) -> list[KvEvent]:
        """Changes since the last call, in order; each event has either stored or removed keys."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ transitions

    def _become_idle(self, block: int) -> None:
        if self._pins[block]:
            self._pinned += 1
        else:
            self._park(block)

    def _leave_idle(self, block: int) -> None:
        if self._pins[block]:
            self._pinned -= 1
        elif self._key_of[block] is not None:
            del self._reusable[block]
        else:
            raise RuntimeError(f"block {block} is free and has no content to acquire")

    def _park(self, block: int) -> None:
        if self._key_of[block] is None:
            self._free.append(block)
        else:
            self._reusable[block] = None

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        self._key_of[block] = None
        del self._block_of[key]
        self.evicted += 1
        if self._events and self._events[-1].removed:
            self._events[-1].removed.append(key)
        else:
            self._events.append(KvEvent(removed=[key]))
        return block
