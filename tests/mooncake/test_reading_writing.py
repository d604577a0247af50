"""How blocks are read and written, against an agent and a holder that the test plays itself."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from played_agent import PlayedAgent

from mooncake_pool import access as access_module
from mooncake_pool import reading, wire
from mooncake_pool.access import Access
from mooncake_pool.blockstore import TRAILER_BYTES, read_value, write_value
from mooncake_pool.client import Outcome, Place
from mooncake_pool.lending import Lender, LentMemory
from mooncake_pool.link import Lane
from mooncake_pool.reading import Reader
from mooncake_pool.writing import Writer

BLOCK = 1000
VALUE = BLOCK + TRAILER_BYTES
FAR = "192.0.2.77:9"  # a holder on another host


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK)


class Rig:
    """One client whose agent is the test, and a segment of this host."""

    def __init__(self) -> None:
        self.agent = PlayedAgent(slots=8, value_bytes=VALUE)
        self.access = Access("both", BLOCK, 64, lambda: None)
        self.access.link, self.access.reason = self.agent.link, None
        self.reader, self.writer = Reader(self.access), Writer(self.access)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        lent = LentMemory(1 << 20)
        self.memory = memoryview(mmap.mmap(lent.fd, 1 << 20))
        lent.find_mapping()
        self._base = lent.base
        self._lender = Lender(lent)

    def near(self, number: int) -> Place:
        return Place(self._endpoint, self._base + 4096 * number, VALUE)

    def value(self, number: int) -> memoryview:
        return self.memory[4096 * number : 4096 * number + VALUE]

    def run(self, work: Callable[[], int]) -> Running:
        return Running(work)

    def reply(self, request: wire.ToAgent, outcomes: list[Outcome], places: list[Place | None] = []) -> None:  # noqa: B006
        assert isinstance(request, wire.Locate | wire.Reserve | wire.Get | wire.Put | wire.Contains)
        lengths = [VALUE] * len(outcomes) if isinstance(request, wire.Get) else []
        self.agent.send(wire.Reply(request.call, [int(outcome) for outcome in outcomes], lengths, places))

    def close(self) -> None:
        self.access.close()
        self._lender.close()
        self._listener.close()
        self.agent.close()


class Running(threading.Thread):
    def __init__(self, work: Callable[[], int]) -> None:
        super().__init__()
        self._work = work
        self.result = -1
        self.start()

    def run(self) -> None:
        self.result = self._work()

    def done(self) -> int:
        self.join(5)
        assert not self.is_alive()
        return self.result


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig()
    yield one
    one.close()


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(BLOCK)) for _ in range(count)]


def get(rig: Rig, count: int, into: list[memoryview], seconds: float = 5.0) -> Running:
    keys = [key(i) for i in range(count)]
    return rig.run(lambda: rig.reader.get(keys, into, time.monotonic() + seconds))


def put(rig: Rig, count: int, seconds: float = 5.0) -> Running:
    keys, blocks = [key(i) for i in range(count)], [block(i) for i in range(count)]
    return rig.run(lambda: rig.writer.put(keys, blocks, time.monotonic() + seconds))


# ---------------------------------------------------------------- reading


def test_the_second_part_is_asked_for_while_the_first_is_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(access_module._FIRST_KEYS, Lane.READ, 16)
    for i in range(20):
        write_value(rig.value(i), block(i), key(i), 0)
    into = buffers(20)
    running = get(rig, 20, into)
    first, second = rig.agent.next(), None
    assert isinstance(first, wire.Locate) and len(first.keys) == 16
    rig.reply(first, [Outcome.OK] * 16, [rig.near(i) for i in range(16)])
    second = rig.agent.next()
    assert isinstance(second, wire.Locate) and len(second.keys) == 4
    rig.reply(second, [Outcome.OK] * 4, [rig.near(i) for i in range(16, 20)])
    assert running.done() == 20 and into == [block(i) for i in range(20)]
    assert rig.access.totals() == {"blocks_read_mapped": 20, "blocks_read": 20, "blocks_not_read": 0}
    assert rig.agent.link.activity.snapshot().got_from[rig.near(0).endpoint].blocks == 20


def test_only_the_run_before_a_miss_counts(rig: Rig) -> None:
    for i in (0, 2):
        write_value(rig.value(i), block(i), key(i), 0)
    running = get(rig, 3, buffers(3))
    rig.reply(rig.agent.next(), [Outcome.OK, Outcome.MISS, Outcome.OK], [rig.near(0), None, rig.near(2)])
    assert running.done() == 1 and rig.access.totals()["misses"] == 1


def test_a_value_that_changes_under_the_read_is_dropped(rig: Rig) -> None:
    """Evicted and given to another key between the answer and the copy, at any place."""
    for spoil in (lambda v: v.__setitem__(slice(0, 5), b"other"), lambda v: write_value(v, block(9), key(9), 0)):
        write_value(rig.value(0), block(0), key(0), 0)
        write_value(rig.value(1), block(1), key(1), 0)
        spoil(rig.value(1))
        running = get(rig, 2, buffers(2))
        rig.reply(rig.agent.next(), [Outcome.OK] * 2, [rig.near(0), rig.near(1)])
        assert running.done() == 1
    assert rig.access.totals()["blocks_invalid"] == 2


def test_a_value_that_was_never_finished_is_forgotten_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    running = get(rig, 1, buffers(1))
    rig.reply(rig.agent.next(), [Outcome.OK], [rig.near(0)])
    assert running.done() == 0
    monkeypatch.setattr(reading, "DOUBT_SECONDS", 0.0)
    running = get(rig, 1, buffers(1))
    rig.reply(rig.agent.next(), [Outcome.OK], [rig.near(0)])
    assert running.done() == 0
    forget = rig.agent.next()
    assert isinstance(forget, wire.Forget) and forget.keys == [key(0)]
    assert rig.access.totals()["blocks_forgotten"] == 1


def test_a_holder_elsewhere_is_read_through_slots_and_left_alone_once_it_failed(rig: Rig) -> None:
    far: list[Place | None] = [Place(FAR, 1, VALUE), Place(FAR, 2, VALUE)]
    into = buffers(2)
    running = get(rig, 2, into)
    rig.reply(rig.agent.next(), [Outcome.OK] * 2, far)
    request = rig.agent.next()
    assert isinstance(request, wire.Get)
    for i, slot in enumerate(request.slots):
        write_value(rig.agent.link.staging.value(slot), block(i), key(i), 0)
    rig.reply(request, [Outcome.OK] * 2)
    assert running.done() == 2 and into == [block(0), block(1)]
    running = get(rig, 2, into)
    rig.reply(rig.agent.next(), [Outcome.OK] * 2, far)
    rig.reply(rig.agent.next(), [Outcome.TRANSFER_FAILED] * 2)
    assert running.done() == 0
    begun = time.monotonic()
    running = get(rig, 2, into)
    rig.reply(rig.agent.next(), [Outcome.OK] * 2, far)
    assert running.done() == 0 and time.monotonic() - begun < 1.0  # no second Get was sent
    totals = rig.access.totals()
    assert (totals["reads_failed"], totals["reads_of_failing_holder"]) == (1, 1)


def test_a_value_of_another_size_is_no_block(rig: Rig) -> None:
    running = get(rig, 1, buffers(1))
    rig.reply(rig.agent.next(), [Outcome.OK], [Place(rig.near(0).endpoint, rig.near(0).address, VALUE - 8)])
    assert running.done() == 0 and rig.access.totals()["blocks_invalid"] == 1


# ---------------------------------------------------------------- writing


def test_places_are_filled_and_settled(rig: Rig) -> None:
    running = put(rig, 3)
    request = rig.agent.next()
    assert isinstance(request, wire.Reserve) and request.keys == [key(0), key(1), key(2)]
    outcomes = [Outcome.OK, Outcome.PRESENT, Outcome.NO_SPACE]
    rig.reply(request, outcomes, [rig.near(0), None, None])
    settle = rig.agent.next()
    assert isinstance(settle, wire.Settle) and (settle.reservation, settle.unfilled) == (request.call, [])
    assert running.done() == 2
    into = buffers(1)[0]
    assert read_value(rig.value(0), into, key(0), 0) and into == block(0)
    totals = rig.access.totals()
    assert (totals["blocks_present"], totals["puts_no_space"], totals["blocks_not_stored"]) == (1, 1, 1)
    assert rig.agent.link.activity.snapshot().put_to[rig.near(0).endpoint].bytes == VALUE


def test_a_place_elsewhere_is_given_back_and_its_block_goes_through_a_slot(rig: Rig) -> None:
    running = put(rig, 2)
    rig.reply(rig.agent.next(), [Outcome.OK] * 2, [rig.near(0), Place(FAR, 1, VALUE)])
    settle = rig.agent.next()
    assert isinstance(settle, wire.Settle) and settle.unfilled == [key(1)]
    asked = rig.agent.next()
    assert isinstance(asked, wire.Contains) and asked.before_put and asked.keys == [key(1)]
    rig.reply(asked, [Outcome.MISS])
    request = rig.agent.next()
    assert isinstance(request, wire.Put) and request.keys == [key(1)]
    rig.reply(request, [Outcome.OK], [Place(FAR, 5, VALUE)])
    assert running.done() == 2
    assert rig.agent.link.activity.snapshot().put_to[FAR].blocks == 1
    running = put(rig, 1)
    asked = rig.agent.next()
    assert isinstance(asked, wire.Contains)  # no reservation for a while
    rig.reply(asked, [Outcome.OK])
    assert running.done() == 1


def test_after_a_holder_did_not_take_blocks_puts_pause(rig: Rig) -> None:
    running = put(rig, 1)
    rig.reply(rig.agent.next(), [Outcome.OK], [Place(FAR, 1, VALUE)])
    assert isinstance(rig.agent.next(), wire.Settle)
    rig.reply(rig.agent.next(), [Outcome.MISS])
    rig.reply(rig.agent.next(), [Outcome.TRANSFER_FAILED], [None])
    assert running.done() == 0
    begun = time.monotonic()
    assert put(rig, 1).done() == 0 and time.monotonic() - begun < 1.0
    totals = rig.access.totals()
    assert (totals["puts_failed"], totals["puts_paused"], totals["blocks_not_stored"]) == (1, 1, 2)


def test_a_late_reservation_is_given_back(rig: Rig) -> None:
    running = put(rig, 20, seconds=0.05)
    request = rig.agent.next()
    assert isinstance(request, wire.Reserve)
    settle = rig.agent.next()
    assert isinstance(settle, wire.Settle)
    assert (settle.reservation, settle.unfilled) == (request.call, [key(i) for i in range(16)])
    assert running.done() == 0 and rig.access.totals()["calls_late"] == 1


def test_roles_and_troubles_ask_nobody(rig: Rig) -> None:
    rig.access.reason = "no master"
    assert get(rig, 1, buffers(1)).done() == 0 and put(rig, 1).done() == 0
    assert rig.access.totals()["calls_refused"] == 2


def test_large_blocks_are_copied_by_two_threads() -> None:
    access = Access("both", 1 << 20, 64, lambda: None)
    both = threading.Barrier(2, timeout=5)
    assert access.in_two(lambda i: both.wait() >= 0 and i != 2, 4) == [True, True, False, True]
    assert access.in_two(lambda _: True, 1) == [True] and access.in_two(lambda _: True, 0) == []
    access.close()


def test_a_helper_that_does_not_get_to_run_delays_nobody() -> None:
    access = Access("both", 1 << 20, 64, lambda: None)
    release = threading.Event()
    for _ in range(2):
        access._copiers._helpers.submit(release.wait, 5)
    caller = threading.current_thread().name
    names: list[str] = []
    assert access.in_two(lambda _: names.append(threading.current_thread().name) is None, 3) == [True] * 3
    assert names == [caller] * 3
    release.set()
    access.close()
