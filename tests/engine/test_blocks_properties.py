"""Any order of calls that the scheduler may make keeps the counts, the reservation and the events right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from kvstore.hashing import block_keys

TOTAL = 10
CHAINS = [block_keys([chain, *range(4)], 1) for chain in range(4)]


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.generation = [0] * TOTAL
        self.pool = BlockPool(TOTAL, on_new_owner=self.new_owner)
        self.sequences: list[tuple[list[int], list[bytes], int]] = []  # table, chain, reserved
        self.pins: list[list[int]] = []
        self.mirror: set[bytes] = set()  # what a reader of the events believes

    def new_owner(self, block: int) -> None:
        assert all(block not in table for table, _, _ in self.sequences)
        assert all(block not in pinned for pinned in self.pins)
        self.generation[block] += 1

    @rule(chain=st.sampled_from(CHAINS), extra=st.integers(0, 3))
    def admit(self, chain: list[bytes], extra: int) -> None:
        found = self.pool.match(chain)
        new = len(chain) - len(found) + extra
        if self.pool.can_reserve(new, found):
            self.pool.acquire(found)
            self.pool.reserve(new)
            self.sequences.append((found, chain, new))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        table, chain, reserved = self.sequences[index]
        if reserved:
            [block] = self.pool.allocate(1)
            self.pool.check_writable(block)
            table.append(block)
            self.sequences[index] = (table, chain, reserved - 1)
            if len(table) <= len(chain):
                self.pool.register(block, chain[len(table) - 1])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), offered=st.booleans())
    def end(self, data: st.DataObject, offered: bool) -> None:
        table, _, reserved = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if offered:
            self.pool.pin(table)
            self.pins.append(table)
        self.pool.release(table)
        self.pool.unreserve(reserved)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pool.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert pool.used + pool.pinned + pool.reusable + pool.free == TOTAL
        in_use = {block for table, _, _ in self.sequences for block in table}
        pinned = {block for table in self.pins for block in table}
        assert pool.used == len(in_use) and pool.pinned == len(pinned - in_use)

    @invariant()
    def reservations_can_be_kept(self) -> None:
        assert self.pool.reserved == sum(reserved for _, _, reserved in self.sequences) <= self.pool.available

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.pool.drain_events():
            assert bool(event.stored) != bool(event.removed)
            assert not self.mirror & set(event.stored) and set(event.removed) <= self.mirror
            self.mirror = (self.mirror | set(event.stored)) - set(event.removed)
        assert self.mirror == set(self.pool.resident_keys())

    def teardown(self) -> None:
        for table, _, reserved in self.sequences:
            self.pool.release(table)
            self.pool.unreserve(reserved)
        for pinned in self.pins:
            self.pool.unpin(pinned)
        assert self.pool.used == self.pool.pinned == self.pool.reserved == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
