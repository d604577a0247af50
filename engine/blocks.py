"""Who owns each KV block, and which blocks hold which prefix. No torch, no bytes: block numbers only.

    free ──allocate──► used ──release──► reusable (it has a key) or free (it has none)
                        ▲                   │
                        └───── acquire ─────┤
                        └──── allocate ◄────┘ evicted (to host memory, if there is such a tier), by priority and age

A block is *used* while a request refers to it, *pinned* while only a hand-off, a fetch or a put does, *reusable* while
nobody does but its content is findable, and *free* otherwise; the four counts always sum to the total.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.cache_changes import CacheChanges, CacheLog
from engine.eviction import DEFAULT_PRIORITY, EvictionQueue, Expiries
from engine.host_tier import Content, HostTier
from kvstore.protocol import KvEvent


def _nothing(_block: int) -> None:
    pass


class BlockPool:
    """Blocks 0 .. num_blocks-1 of one worker.

    `on_new_owner(block)` is called for every allocated block, before anything is written to it. With `reuse` off no
    block is ever findable. Blocks are allocated against a reservation only, so that a request that was admitted never
    waits for a block: `available` minus `reserved` is what new requests may still claim.
    """

    def __init__(
        self,
        num_blocks: int,
        reuse: bool = True,
        on_new_owner: Callable[[int], None] = _nothing,
        host: HostTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.reuse = reuse
        self.reserved = 0
        self.evicted = 0
        self.allocated = 0  # ever
        self.host = host if reuse else None
        self.changes = CacheChanges()
        self._on_new_owner = on_new_owner
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._followers: dict[bytes, dict[int, None]] | None = None
        self._free = deque(range(num_blocks))
        self._reusable = EvictionQueue()
        self._expiries = Expiries(clock)
        self._used = 0
        self._pinned = 0

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

    def report_to(self, log: CacheLog) -> None:
        """Have every change told to `log` too, with the blocks' tokens."""
        self.changes.logs.append(log)

    # ------------------------------------------------------------ reservation

    def can_reserve(self, new_blocks: int, cached: Iterable[int | None] = ()) -> bool:
        """Whether `new_blocks` can be reserved after the blocks `cached` have been acquired."""
        revived = sum(block in self._reusable for block in cached if block is not None)
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
        self.allocated += count
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
        if self._refs[block] != 1 or self._pins[block] or self._contents[block] is not None:
            raise RuntimeError(
                f"write to block {block} with {self._refs[block]} references, {self._pins[block]} pins, "
                f"{'a' if self._contents[block] else 'no'} key"
            )

    # ------------------------------------------------------------ prefix cache

    def match(self, keys: Iterable[bytes]) -> list[int | None]:
        """The blocks of the leading keys that are here, None for those in host memory: a block behind a gap is of no
        use."""
        found: list[int | None] = []
        host = self.host
        for key in keys:
            block = self._block_of.get(key)
            if block is None and (host is None or key not in host):
                break
            found.append(block)
        return found

    def claim(self, keys: Sequence[bytes], found: Sequence[int | None]) -> list[int]:
        """The blocks that `match` found for `keys`, with one reference more. Those in host memory are brought back into
        blocks out of the reservation, one each."""
        self.acquire(block for block in found if block is not None)
        missing = [key for key, block in zip(keys, found, strict=True) if block is None]
        if not missing:
            return [block for block in found if block is not None]
        assert self.host is not None
        # Before any allocation, which may evict blocks into the host tier and others out of it.
        places = iter([self.host.reserve(key) for key in missing])
        return [self._bring_back(next(places)) if block is None else block for block in found]

    def _bring_back(self, place: int) -> int:
        assert self.host is not None
        [block] = self.allocate(1)
        content = self.host.restore(place, block)
        self._hold(block, content)
        self.changes.moved(content, level=0)
        return block

    def register(
        self,
        block: int,
        key: bytes,
        parent: bytes = b"",
        tokens: Sequence[int] = (),
        priority: int = DEFAULT_PRIORITY,
        seconds: float | None = None,
    ) -> bool:
        """Make a full block findable. False if another block has that key already; this one then stays private.
        `priority` holds for `seconds`, then it is the default; None = for ever."""
        if not self.reuse or key in self._block_of:
            return False
        content = Content(key, parent, tokens, priority)
        self._hold(block, content)
        if seconds is not None:
            self._expire()
            self._expiries.add(block, key, seconds)
        if self.host is not None and key in self.host:
            self.host.discard(key)
            self.changes.moved(content, level=0)
        else:
            self.changes.stored(content)
        return True

    def set_priority(self, block: int, priority: int, seconds: float | None = None) -> None:
        """Of a findable block, when a request that wants it kept for longer or shorter uses it."""
        content = self._contents[block]
        if content is None:
            return
        if content.priority != priority:
            old, content.priority = content.priority, priority
            if block in self._reusable:
                self._reusable.remove(block)
                self._reusable.add(block, priority)
            self.changes.reprioritised(content, old)
        if seconds is not None:
            self._expiries.add(block, content.key, seconds)

    def resident_keys(self) -> list[bytes]:
        """Of both tiers."""
        return list(self._block_of) + (self.host.keys() if self.host is not None else [])

    def snapshot(self) -> KvEvent:
        """All that is findable, for a reader that knows nothing yet."""
        host = self.host.keys() if self.host is not None else []
        return KvEvent(cleared=True, stored=[*self._block_of, *host], moved=host, level=int(bool(host)))

    def drain_events(self) -> list[KvEvent]:
        """Changes since the last call, in order; each event is of one kind."""
        return self.changes.drain()

    # ------------------------------------------------------------ partly matching blocks

    def index_followers(self) -> None:
        """Keep what `similar` needs. To be called before any block is findable."""
        self._followers = {}

    def similar(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(block, number of leading tokens) of the block behind `parent` that begins with the most of `tokens`;
        nothing in common is (-1, 0)."""
        best = (-1, 0)
        for block in (self._followers or {}).get(parent, ()):
            content = self._contents[block]
            assert content is not None
            common = _common(content.tokens, tokens)
            if common > best[1]:
                best = (block, common)
        return best

    # ------------------------------------------------------------ transitions

    def _hold(self, block: int, content: Content) -> None:
        self._contents[block] = content
        self._block_of[content.key] = block
        if self._followers is not None:
            self._followers.setdefault(content.parent, {})[block] = None

    def _forget(self, block: int) -> Content:
        content = self._contents[block]
        assert content is not None
        self._contents[block] = None
        del self._block_of[content.key]
        if self._followers is not None:
            followers = self._followers[content.parent]
            del followers[block]
            if not followers:
                del self._followers[content.parent]
        return content

    def _become_idle(self, block: int) -> None:
        if self._pins[block]:
            self._pinned += 1
        else:
            self._park(block)

    def _leave_idle(self, block: int) -> None:
        if self._pins[block]:
            self._pinned -= 1
        elif self._contents[block] is not None:
            self._reusable.remove(block)
        else:
            raise RuntimeError(f"block {block} is free and has no content to acquire")

    def _park(self, block: int) -> None:
        content = self._contents[block]
        if content is None:
            self._free.append(block)
        else:
            self._reusable.add(block, content.priority)

    def _expire(self) -> None:
        for block, key in self._expiries.due():
            content = self._contents[block]
            if content is not None and content.key == key:
                self.set_priority(block, DEFAULT_PRIORITY)

    def _evict(self) -> int:
        self._expire()
        block = self._reusable.pop()
        content = self._forget(block)
        self.evicted += 1
        saved, gone = self.host.save(block, content) if self.host is not None else (False, None)
        if gone is not None:
            self.changes.removed(gone)
        if saved:
            self.changes.moved(content, level=1)
        else:
            self.changes.removed(content)
        return block


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal leading tokens."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
