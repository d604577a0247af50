"""Fetcher, Publisher and Delays: the threads, with no loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engine_rig import MemoryStore

from engine.delays import Delays
from engine.transfers import Fetcher, FetchJob, Publisher
from kvstore.handoff import HANDLE_VERSION, Handle, StartState
from kvstore.transceivers.shm import SharedPool

SIZE = 64
KEYS = [bytes([index]) * 16 for index in range(40)]


class Rig:
    """A source pool whose block i is full of i + 1, and a target."""

    def __init__(self) -> None:
        self.source = SharedPool.create(40, SIZE, "source")
        self.target = SharedPool.create(40, SIZE, "target")
        self.store = MemoryStore()
        for block in range(40):
            self.source.bump(block)
            self.source.block(block)[:] = bytes([block + 1]) * SIZE
        self.done: queue.SimpleQueue[FetchJob] = queue.SimpleQueue()
        self.delays = Delays(True)
        self.fetchers: list[Fetcher] = []

    def fetcher(self, *paths: str, store: Any = None) -> Fetcher:
        made = Fetcher(paths, self.target.block, store or self.store, 0.3, self.delays, self.done.put)
        self.fetchers.append(made)
        return made

    def job(self, blocks: int, keys: int, handle: bool = True, first: int = 0, seconds: float = 5.0) -> FetchJob:
        ids = list(range(first + blocks))
        made = Handle(
            version=HANDLE_VERSION,
            handoff_id=1,
            incarnation="source",
            fingerprint="f",
            endpoint="",
            prompt_tokens=1,
            block_ids=ids,
            generations=[1] * len(ids),
            starts=[StartState(0, 1, 1)],
            shared_memory=self.source.descriptor(),
            pool=True,
        )
        deadline = time.monotonic() + seconds
        return FetchJob("r", list(range(blocks)), KEYS[first : first + keys], first, deadline, made if handle else None)

    def run(self, fetcher: Fetcher, job: FetchJob) -> FetchJob:
        fetcher.start(job)
        assert self.done.get(timeout=10) is job
        return job

    def target_values(self, count: int) -> list[int]:
        return [self.target.block(block)[0] for block in range(count)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for fetcher in made.fetchers:
        fetcher.close(5.0)


def test_shared_memory_brings_the_tail_too(rig: Rig) -> None:
    job = rig.run(rig.fetcher("shm", "pool"), rig.job(35, 34, first=2))
    assert job.complete and job.satisfied and job.by_path == {"shm": 35} and job.path == "shm"
    assert rig.target_values(35) == list(range(3, 38))
    assert not rig.store.calls


def test_what_shared_memory_gave_before_it_failed_is_kept(rig: Rig) -> None:
    rig.source.bump(20)
    rig.store.values = {key: bytes([100 + index]) * SIZE for index, key in enumerate(KEYS)}
    job = rig.run(rig.fetcher("shm", "pool"), rig.job(35, 34))
    assert job.failures == ["stale"] and job.by_path == {"shm": 16, "pool": 18}
    assert job.loaded == 34 and not job.complete and job.keyed_complete and job.satisfied
    assert rig.target_values(34) == [*range(1, 17), *range(116, 134)]


def test_order_of_paths_is_the_configured_one(rig: Rig) -> None:
    rig.store.values = {key: bytes(SIZE) for key in KEYS}
    job = rig.run(rig.fetcher("pool", "shm"), rig.job(5, 4))
    assert job.by_path == {"pool": 4, "shm": 1} and job.complete


def test_no_path(rig: Rig) -> None:
    job = rig.run(rig.fetcher(), rig.job(3, 3))
    assert job.failures == ["no_path"] and job.path == "recompute" and not job.satisfied


def test_a_lookup_that_finds_nothing_is_no_failure(rig: Rig) -> None:
    job = rig.run(rig.fetcher("shm", "pool"), rig.job(3, 3, handle=False))
    assert job.loaded == 0 and not job.failures and job.path is None
    assert rig.store.calls == ["contains"]


def test_a_job_past_its_deadline_does_not_read(rig: Rig) -> None:
    job = rig.run(rig.fetcher("shm", "pool"), rig.job(3, 3, seconds=-1.0))
    assert job.failures == ["timeout"] and job.loaded == 0 and not job.satisfied


def test_a_cancel_ends_a_delay(rig: Rig) -> None:
    rig.delays.set({"fetch": 60.0})
    fetcher = rig.fetcher("shm")
    job = rig.job(3, 3)
    fetcher.start(job)
    fetcher.cancel(job)
    assert rig.done.get(timeout=10) is job
    assert job.loaded == 0 and not job.satisfied


def test_an_unexpected_error_ends_the_job_and_not_the_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def contains(self, keys: Sequence[bytes], timeout: float) -> int:
            raise ZeroDivisionError

    fetcher = rig.fetcher("pool", store=Broken())
    for _ in range(3):
        assert rig.run(fetcher, rig.job(3, 3, handle=False)).failures == ["internal"]
    assert "ZeroDivisionError" in caplog.text


def test_puts_are_batched_and_closing_gives_up_the_rest(rig: Rig) -> None:
    done: queue.SimpleQueue[tuple[list[int], int]] = queue.SimpleQueue()
    gate = threading.Event()
    sizes: list[int] = []

    class Slow(MemoryStore):
        def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
            sizes.append(len(keys))
            gate.wait(10)
            return super().put(keys, blocks, timeout)

    store = Slow()
    publisher = Publisher(store, rig.source.block, 8, 1.0, rig.delays, lambda *each: done.put(each))
    for block in range(20):
        publisher.put(KEYS[block], block)
    while not sizes:
        time.sleep(0.001)
    gate.set()
    taken = [done.get(timeout=10) for _ in range(len(range(0, 20, 8)))]
    while sum(len(blocks) for blocks, _ in taken) < 20:
        taken.append(done.get(timeout=10))
    assert [block for blocks, _ in taken for block in blocks] == list(range(20))
    assert all(stored == len(blocks) for blocks, stored in taken) and max(sizes) <= 8
    assert store.values[KEYS[4]] == bytes([5]) * SIZE
    rig.delays.set({"publish": 60.0})
    publisher.put(KEYS[0], 0)
    start = time.monotonic()
    publisher.close(10.0)
    assert time.monotonic() - start < 5


def test_delays_do_nothing_without_fault_injection() -> None:
    delays = Delays(False)
    delays.set({"step": 60.0})
    delays.wait("step", lambda: False)
    assert delays.of("step") == 0.0
    delays.wake()


def test_changing_a_delay_frees_those_who_wait() -> None:
    delays = Delays(True)
    delays.set({"step": 60.0})
    waiter = threading.Thread(target=delays.wait, args=("step", lambda: False))
    waiter.start()
    delays.set({})
    waiter.join(10)
    assert not waiter.is_alive()
