from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from kvstore.errors import StaleBlock, TransferError
from kvstore.handoff import SharedMemory
from kvstore.transceivers.shm import ReaderCache, SharedPool, SharedPoolReader

BYTES = 1000  # not a multiple of the page size


@pytest.fixture
def pool() -> SharedPool:
    return SharedPool.create(8, BYTES, "me")


def fill(pool: SharedPool, block: int, value: int) -> None:
    pool.bump(block)
    pool.block(block)[:] = bytes([value]) * BYTES


def test_blocks_are_read_as_written(pool: SharedPool) -> None:
    for block in range(8):
        fill(pool, block, block)
    reader = SharedPoolReader.open(pool.descriptor(), "me")
    into = [bytearray(BYTES) for _ in range(3)]
    reader.read([7, 0, 3], [1, 1, 1], [memoryview(buffer) for buffer in into])
    assert [set(buffer) for buffer in into] == [{7}, {0}, {3}]
    assert pool.blocks_buffer.nbytes == 8 * BYTES and pool.blocks_buffer[7 * BYTES] == 7
    assert (reader.num_blocks, reader.block_bytes) == (8, BYTES)
    reader.close()
    pool.close()


def test_a_block_with_a_new_owner_is_stale(pool: SharedPool) -> None:
    fill(pool, 2, 5)
    reader = SharedPoolReader.open(pool.descriptor(), "me")
    buffer = memoryview(bytearray(BYTES))
    reader.read([2], [1], [buffer])
    pool.bump(2)
    with pytest.raises(StaleBlock, match="block 2 was offered at generation 1 and is at 2"):
        reader.read([2], [1], [buffer])


def test_a_read_that_succeeds_has_the_offered_bytes_whatever_the_owner_does_meanwhile() -> None:
    size, rounds = 1 << 20, 100
    pool = SharedPool.create(1, size, "me")
    reader = SharedPoolReader.open(pool.descriptor(), "me")
    offered, overwritten = threading.Barrier(2), threading.Barrier(2)

    def overwrite() -> None:
        for _ in range(rounds):
            offered.wait()
            pool.bump(0)
            pool.block(0)[:] = bytes(size)
            overwritten.wait()

    thread = threading.Thread(target=overwrite)
    thread.start()
    buffer = bytearray(size)
    stale = 0
    for _ in range(rounds):
        pool.bump(0)
        pool.block(0)[:] = b"A" * size
        generation = pool.generation(0)
        offered.wait()
        try:
            reader.read([0], [generation], [memoryview(buffer)])
            assert buffer.count(b"A") == size
        except StaleBlock:
            stale += 1
        overwritten.wait()
    thread.join()
    assert stale


@pytest.mark.parametrize("block", [-1, 8, 1 << 40])
def test_block_numbers_are_not_trusted(pool: SharedPool, block: int) -> None:
    reader = SharedPoolReader.open(pool.descriptor(), "me")
    with pytest.raises(TransferError, match="of a pool of 8"):
        reader.read([block], [0], [memoryview(bytearray(BYTES))])


def test_buffers_must_fit(pool: SharedPool) -> None:
    reader = SharedPoolReader.open(pool.descriptor(), "me")
    with pytest.raises(TransferError, match="a buffer of 10 bytes"):
        reader.read([0], [0], [memoryview(bytearray(10))])
    with pytest.raises(TransferError, match="1 blocks, 2 generations"):
        reader.read([0], [0, 0], [memoryview(bytearray(BYTES))])


def changed(descriptor: SharedMemory, **fields: object) -> SharedMemory:
    return msgspec.structs.replace(descriptor, **fields)


def test_only_the_announced_pool_is_opened(pool: SharedPool, tmp_path: Path) -> None:
    there = pool.descriptor()
    with pytest.raises(TransferError, match="incarnation me, not other"):
        SharedPoolReader.open(there, "other")
    with pytest.raises(TransferError, match="another host"):
        SharedPoolReader.open(changed(there, host_id="else"), "me")
    with pytest.raises(TransferError, match="bytes where"):
        SharedPoolReader.open(changed(there, size=there.size + 4096), "me")
    with pytest.raises(TransferError, match="cannot be reached"):
        SharedPoolReader.open(changed(there, fd=there.fd + 1000), "me")
    file = tmp_path / "file"
    file.write_bytes(b"x" * there.size)
    with file.open("rb") as other, pytest.raises(TransferError, match="magic"):
        SharedPoolReader.open(changed(there, fd=other.fileno()), "me")
    with (tmp_path / "empty").open("w+b") as empty, pytest.raises(TransferError, match="no block pool"):
        SharedPoolReader.open(changed(there, fd=empty.fileno()), "me")


def test_a_copy_of_the_header_in_a_file_that_can_shrink_is_refused(pool: SharedPool, tmp_path: Path) -> None:
    there = pool.descriptor()
    file = tmp_path / "file"
    file.write_bytes(os.pread(there.fd, there.size, 0))
    with file.open("rb") as other, pytest.raises(TransferError):
        SharedPoolReader.open(changed(there, fd=other.fileno()), "me")


def test_sizes_below_one_are_errors() -> None:
    for blocks, size in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="no pool of"):
            SharedPool.create(blocks, size, "me")


OWNER = """
import sys
from kvstore.transceivers.shm import SharedPool
import msgspec
pool = SharedPool.create(4, 1000, "child")
for block in range(4):
    pool.bump(block)
    pool.block(block)[:] = bytes([65 + block]) * 1000
print(msgspec.json.encode(pool.descriptor()).decode(), flush=True)
sys.stdin.read()
"""


@dataclass
class Owner:
    process: subprocess.Popen[str]
    descriptor: SharedMemory

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner() -> Owner:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    descriptor = msgspec.json.decode(process.stdout.readline(), type=SharedMemory)
    owner = Owner(process, descriptor)
    yield owner
    owner.kill()


def test_another_process_reads_and_a_killed_owner_cannot_be_opened_anew(owner: Owner) -> None:
    cache = ReaderCache()
    buffer = bytearray(1000)
    with cache.reader(owner.descriptor, "child") as reader:
        reader.read([2], [1], [memoryview(buffer)])
        assert buffer == b"C" * 1000 and reader.owner_alive()
        owner.kill()
        assert not reader.owner_alive()
        reader.read([3], [1], [memoryview(buffer)])  # what is mapped stays readable, and never faults
        assert buffer == b"D" * 1000
    with pytest.raises(TransferError, match="cannot be reached"):
        SharedPoolReader.open(owner.descriptor, "child")


def test_the_cache_closes_readers_of_dead_owners_when_another_is_opened(owner: Owner, pool: SharedPool) -> None:
    cache = ReaderCache()
    with cache.reader(owner.descriptor, "child") as old:
        owner.kill()
        with cache.reader(pool.descriptor(), "me"):
            assert len(cache) == 1
        buffer = bytearray(1000)
        old.read([0], [1], [memoryview(buffer)])  # dropped from the cache, open until its user is through
        assert buffer == b"A" * 1000
    with pytest.raises(AttributeError):
        old.read([0], [1], [memoryview(buffer)])
    cache.close()
    assert len(cache) == 0


def test_the_cache_opens_a_pool_once_and_keeps_a_limited_number() -> None:
    cache = ReaderCache(limit=2)
    pools = [SharedPool.create(1, 10, f"pool{i}") for i in range(3)]
    with cache.reader(pools[0].descriptor(), "pool0") as first:
        pass
    with cache.reader(pools[0].descriptor(), "pool0") as again:
        assert again is first
    for index in (1, 2):
        with cache.reader(pools[index].descriptor(), f"pool{index}"):
            pass
    assert len(cache) == 2
    with pytest.raises(TransferError), cache.reader(changed(pools[0].descriptor(), fd=10_000), "pool9"):
        pass
    cache.close()
