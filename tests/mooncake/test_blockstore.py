from __future__ import annotations

import random
import time

import pytest
from fake_store import FakeBlockStore, Fault
from hypothesis import given
from hypothesis import strategies as st

from mooncake_pool.blockstore import TRAILER_BYTES, BlockStore, key_part, key_prefix, read_value, scope_of, write_value

KEY = bytes(range(16))
SCOPE = scope_of("trtllm/m")


def sealed(block: bytes, key: bytes = KEY, scope: int = SCOPE) -> bytearray:
    value = bytearray(len(block) + TRAILER_BYTES)
    write_value(memoryview(value), memoryview(block), key, scope)
    return value


def opened(value: bytes | bytearray, key: bytes = KEY, scope: int = SCOPE) -> bytes | None:
    block = bytearray(len(value) - TRAILER_BYTES)
    return bytes(block) if read_value(memoryview(value), memoryview(block), key, scope) else None


@given(st.binary(max_size=300), st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1))
def test_a_sealed_block_opens(block: bytes, key: bytes, scope: int) -> None:
    assert opened(sealed(block, key, scope), key, scope) == block


def test_a_block_longer_than_one_step_of_the_copy() -> None:
    block = random.Random(1).randbytes(3 * 1024 * 1024 + 17)
    value = sealed(block)
    assert opened(value) == block
    value[600_000] ^= 1
    assert opened(value) is None


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_bit_is_found(block: bytes, data: st.DataObject) -> None:
    value = sealed(block)
    reserved = range(len(value) - 8, len(value))
    position = data.draw(st.integers(0, len(value) - 1).filter(lambda i: i not in reserved))
    value[position] ^= 1 << data.draw(st.integers(0, 7))
    assert opened(value) is None


def test_another_key_scope_or_length_is_no_answer() -> None:
    value = sealed(b"block")
    assert opened(value, key=bytes(16)) is None
    assert opened(value, scope=scope_of("trtllm/other")) is None
    assert opened(b"x" * 8 + value) is None  # a good trailer behind a longer block
    assert opened(value[1:]) is None
    assert opened(bytes(len(value))) is None


def test_key_prefix_names_all_that_bytes_depend_on() -> None:
    assert key_prefix("meta/llama-3", 32, 1024, "f00d") == "meta/llama-3/w1r0/lg0/t32b1024/f00d"
    assert key_prefix("m", 32, 1024, "f", world=4, rank=3, group=1) == "m/w4r3/lg1/t32b1024/f"
    assert key_part("a,b&c?d\ne f%") == "a%2Cb%26c%3Fd%0Ae%20f%25"


# ---------------------------------------------------------------- the fake that other parts test with

SIZE = 64
KEYS = [bytes([i]) * 16 for i in range(5)]
BLOCKS = [memoryview(bytes([i + 1]) * SIZE) for i in range(5)]


def buffers() -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in KEYS]


def filled() -> FakeBlockStore:
    store = FakeBlockStore(SIZE)
    assert store.put(KEYS, BLOCKS, 1.0) == 5
    return store


def test_fake_round_trip() -> None:
    store: BlockStore = filled()
    into = buffers()
    assert store.contains([*KEYS, bytes(15) + b"x"], 1.0) == 5
    assert store.get(KEYS, into, 1.0) == 5 and into == BLOCKS
    assert store.state() == "up"
    store.close()
    assert store.get(KEYS, into, 1.0) == 0 and store.state() == "degraded: closed"


@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("fault", Fault)
def test_every_fault_ends_the_run_there_and_touches_nothing_behind(fault: Fault, position: int) -> None:
    store = filled()
    store.fail("get", fault, block=position)
    into = buffers()
    assert store.get(KEYS, into, 0.02) == position
    assert into[:position] == BLOCKS[:position]
    assert all(bytes(buffer) == bytes(SIZE) for buffer in into[position + 1 :])
    store.heal()
    assert store.get(KEYS, into, 1.0) == 5


def test_fault_at_a_key_and_at_every_block() -> None:
    store = filled()
    store.fail("get", "zeros", block=KEYS[3])
    assert store.get(KEYS, buffers(), 1.0) == 3
    store.fail("contains", "refused")
    assert store.contains(KEYS, 1.0) == 0


def test_a_timeout_lasts_as_long_as_the_caller_waits() -> None:
    store = filled()
    store.fail("get", Fault.TIMEOUT, block=1)
    begun = time.monotonic()
    assert store.get(KEYS, buffers(), 0.1) == 1
    assert 0.09 < time.monotonic() - begun < 1.0


def test_put_faults_only_skip() -> None:
    store = FakeBlockStore(SIZE)
    store.fail("put", Fault.MISSING, block=2)
    assert store.put(KEYS, BLOCKS, 1.0) == 4
    store.fail("put", Fault.DEAD, block=0)
    assert store.put(KEYS, BLOCKS, 1.0) == 0 and store.state().startswith("degraded")


def test_two_fakes_of_one_pool() -> None:
    one = filled()
    other = FakeBlockStore(SIZE, values=one.values)
    assert other.get(KEYS, buffers(), 1.0) == 5
    stranger = FakeBlockStore(SIZE, prefix="another model", values=one.values)
    assert stranger.get(KEYS, buffers(), 1.0) == 0


def test_callers_mistakes_are_errors() -> None:
    store = filled()
    with pytest.raises(ValueError, match="block key of 3 bytes: 16 are needed"):
        store.contains([b"abc"], 1.0)
    with pytest.raises(ValueError, match="5 keys but 1 buffers"):
        store.put(KEYS, BLOCKS[:1], 1.0)
    with pytest.raises(ValueError, match="block buffer of 3 bytes: this store's blocks have 64"):
        store.put(KEYS[:1], [memoryview(b"abc")], 1.0)
