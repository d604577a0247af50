"""Copies within this host's memory: every byte, every length, and both threads at their end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.transceivers.copying import Copiers, copy_bytes

KIB = 1024


@pytest.mark.parametrize(
    "length", [0, 1, 64, 512 * KIB - 1, 512 * KIB, 512 * KIB + 1, 1024 * KIB - 64, 1024 * KIB, 1024 * KIB + 4097]
)
def test_every_byte_is_copied_and_none_beside(length: int) -> None:
    source = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    around = np.full(length + 32, 7, dtype=np.uint8)
    copy_bytes(memoryview(around)[16 : 16 + length], memoryview(source))
    assert np.array_equal(around[16 : 16 + length], source)
    assert (around[:16] == 7).all()
    assert (around[16 + length :] == 7).all()


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes to copy into 4"):
        copy_bytes(memoryview(bytearray(4)), memoryview(bytes(5)))


@pytest.mark.parametrize("worth_sharing", [1, 1 << 40])
def test_each_block_is_worked_on_once(worth_sharing: int) -> None:
    copiers = Copiers(worth_sharing)
    seen: list[int] = []
    copiers.each(seen.append, 100, 10)
    copiers.each(seen.append, 0, 10)
    assert sorted(seen) == list(range(100))
    copiers.close()


def test_both_threads_have_ended_when_one_fails() -> None:
    copiers = Copiers(1, helpers=1)
    both = threading.Barrier(2, timeout=10)
    running: list[int] = []

    def work(i: int) -> None:
        both.wait()
        if threading.current_thread() is caller:
            raise RuntimeError("mine")
        running.append(i)

    caller = threading.current_thread()
    with pytest.raises(RuntimeError, match="mine"):
        copiers.each(work, 2, 1)
    assert len(running) == 1, "what the helper had begun is done"
    copiers.close()


def test_after_the_close_the_caller_works_alone() -> None:
    copiers = Copiers(1)
    copiers.close()
    seen: list[int] = []
    copiers.each(seen.append, 3, 10)
    assert seen == [0, 1, 2]
