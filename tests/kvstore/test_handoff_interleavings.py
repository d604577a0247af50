"""Both sides of a hand-off as state machines over real block pools, driven through every kind of disorder.

The model: a context worker and a generation worker, each a BlockPool with its HandoffTable, and a network that delays,
loses, doubles and reorders what they send. Blocks carry the name of the request whose bytes they hold. Checked after
every step: nobody reads bytes of another request as its own, nobody writes to a block that is not his, and the pools'
books balance. At the end, when everything has had its time, all blocks of both sides are free.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from kvstore.handoff import Handoff, HandoffConflict, HandoffTable

BLOCKS = 6
EACH = 2  # blocks of one prompt
TIMEOUT = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Offer:
    key: int
    incarnation: str
    pages: list[int]
    generations: list[int]


class Context:
    """The holder. Its crash forgets everything, its memory included."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lives = itertools.count()
        self.crash()

    def crash(self) -> None:
        self.incarnation = f"context-{next(self._lives)}"
        self.generations = [0] * BLOCKS
        self.bytes: list[object] = [None] * BLOCKS
        self.blocks = BlockPool(BLOCKS, reuse=False, on_new_owner=self._bump)
        self.table: HandoffTable[int] = HandoffTable(self.incarnation, TIMEOUT, self._ended, self._clock)

    def _bump(self, block: int) -> None:
        self.generations[block] += 1

    def _ended(self, handoff: Handoff[int]) -> None:
        self.blocks.unpin(handoff.pages)

    def prefill(self, key: int) -> Offer | None:
        if not self.blocks.can_reserve(EACH) or key in self.table:
            return None
        self.blocks.reserve(EACH)
        pages = self.blocks.allocate(EACH)
        for page in pages:
            self.bytes[page] = (self.incarnation, key)
        self.blocks.pin(pages)
        self.table.offer(key, pages)
        self.blocks.release(pages)
        return Offer(key, self.incarnation, pages, [self.generations[page] for page in pages])


@dataclasses.dataclass
class Read:
    """A fetch under way: bytes come block by block, and the owner's generations are looked at last."""

    offer: Offer
    request: int
    blocks: list[int]
    taken: list[object] = dataclasses.field(default_factory=list)
    given_up: bool = False


class Generation:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.crash()

    def crash(self) -> None:
        self.owner: list[int | None] = [None] * BLOCKS
        self.bytes: list[object] = [None] * BLOCKS
        self.blocks = BlockPool(BLOCKS, reuse=False)
        self.reads: list[Read] = []
        self.done: list[tuple[int, list[int]]] = []  # running requests and their blocks

    def begin(self, offer: Offer, request: int) -> bool:
        if not self.blocks.can_reserve(EACH):
            return False
        self.blocks.reserve(EACH)
        blocks = self.blocks.allocate(EACH)
        for block in blocks:
            self.owner[block] = request
        self.blocks.pin(blocks)
        self.reads.append(Read(offer, request, blocks))
        return True

    def cancel(self, read: Read) -> None:
        """The request is over; the blocks stay pinned until the transport has ended."""
        if not read.given_up:
            read.given_up = True
            self.blocks.release(read.blocks)

    def finish(self, index: int) -> None:
        _, blocks = self.done.pop(index)
        self.blocks.release(blocks)


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.context = Context(self.clock)
        self.generation = Generation(self.clock)
        self.offers: list[Offer] = []
        self.network: list[tuple[str, int, str | None]] = []  # acknowledgements and releases on their way
        self.requests = itertools.count()
        self.recomputed = 0

    # ---------------------------------------------------------------- what can happen

    def prefill(self, number: int) -> None:
        try:
            offer = self.context.prefill(number)
        except HandoffConflict:
            return
        if offer is not None:
            self.offers.append(offer)

    def decode(self, number: int) -> None:
        """Also of a hand-off that was decoded before, was released, or whose holder is gone."""
        if self.offers:
            self.generation.begin(self.offers[number % len(self.offers)], next(self.requests))

    def transfer(self, number: int) -> None:
        """One block of a read under way, or its end."""
        if not self.generation.reads:
            return
        read = self.generation.reads[number % len(self.generation.reads)]
        if len(read.taken) < EACH and read.offer.incarnation == self.context.incarnation:
            index = len(read.taken)
            read.taken.append(self.context.bytes[read.offer.pages[index]])
            self._write(read, index)
            return
        self._end(read)

    def _write(self, read: Read, index: int) -> None:
        block = read.blocks[index]
        assert self.generation.owner[block] == read.request, "a byte into a block of another owner"
        self.generation.bytes[block] = read.taken[index]

    def _end(self, read: Read) -> None:
        self.generation.reads.remove(read)
        offer = read.offer
        alive = offer.incarnation == self.context.incarnation
        fresh = alive and all(
            self.context.generations[page] == generation
            for page, generation in zip(offer.pages, offer.generations, strict=True)
        )
        if fresh and len(read.taken) == EACH:
            assert read.taken == [(offer.incarnation, offer.key)] * EACH, "verified bytes of another request"
        else:
            self.recomputed += 1
            for block in read.blocks:
                self.generation.bytes[block] = (offer.incarnation, offer.key)
        self.generation.blocks.unpin(read.blocks)
        if not read.given_up:
            self.generation.done.append((read.request, read.blocks))
        self.network.append(("acknowledge", offer.key, offer.incarnation))

    def cancel(self, number: int) -> None:
        if self.generation.reads:
            read = self.generation.reads[number % len(self.generation.reads)]
            self.generation.cancel(read)
            self.network.append(("release", read.offer.key, None))

    def finish(self, number: int) -> None:
        if self.generation.done:
            self.generation.finish(number % len(self.generation.done))

    def deliver(self, number: int) -> None:
        if self.network:
            kind, key, incarnation = self.network.pop(number % len(self.network))
            getattr(self.context.table, kind)(key, incarnation)

    def double(self, number: int) -> None:
        if self.network:
            self.network.append(self.network[number % len(self.network)])

    def lose(self, number: int) -> None:
        if self.network:
            self.network.pop(number % len(self.network))

    def wait(self, number: int) -> None:
        self.clock.now += number
        self.context.table.expire()

    def crash_context(self, number: int) -> None:
        self.context.crash()

    def crash_generation(self, number: int) -> None:
        self.generation.crash()

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        for side in (self.context.blocks, self.generation.blocks):
            assert side.used + side.pinned + side.reusable + side.free == BLOCKS and side.reserved == 0
        held = {page for handoff in self.context.table._open.values() for page in handoff.pages}
        assert self.context.blocks.pinned == len(held)

    def settle(self) -> None:
        """Everything that is under way ends, and the leases run out."""
        while self.generation.reads:
            self.transfer(0)
        while self.generation.done:
            self.finish(0)
        self.wait(int(TIMEOUT))
        while self.network:
            self.deliver(0)
        self.check()
        assert self.context.blocks.free == self.generation.blocks.free == BLOCKS


ACTIONS = (
    "prefill", "decode", "transfer", "transfer", "transfer", "cancel", "finish", "deliver", "double", "lose", "wait",
    "crash_context", "crash_generation",
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=80))
def test_any_disorder_ends_with_all_blocks_free(steps: list[tuple[str, int]]) -> None:
    world = World()
    for action, number in steps:
        getattr(world, action)(number)
        world.check()
    world.settle()


EVENTS = ("decode", *["transfer"] * 3, "cancel", "deliver", "wait", "crash_context", "crash_generation")


@pytest.mark.parametrize("double", [False, True])
def test_every_order_of_one_hand_off(double: bool) -> None:
    """All orders of the events of one hand-off, each followed by a second one over the same blocks."""
    seen = 0
    for events in set(itertools.permutations(EVENTS, 5)):
        world = World()
        world.prefill(1)
        for event in events:
            if double:
                world.double(0)
            getattr(world, event)(int(TIMEOUT) if event == "wait" else 0)
            world.check()
        world.prefill(2)
        world.decode(1)
        for _ in range(EACH + 1):
            world.transfer(0)
            world.check()
        world.settle()
        seen += 1
    assert seen > 3000
