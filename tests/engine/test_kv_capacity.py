from __future__ import annotations

import pytest

from engine.kv_capacity import KvCapacity, bytes_per_token, capacity_of

GIB = 2**30


def test_the_worked_example_of_an_8b_model_on_80_gb() -> None:
    """32 layers, 8 KV heads of 128, fp8 KV; 60 GiB free at start-up, fraction 0.9."""
    token = bytes_per_token(32, 8, 128, 1)
    assert token == 65_536
    capacity = capacity_of(60 * GIB, 0.9, token, 32)
    assert capacity.bytes == 54 * GIB == 56_623_104 * 1024
    assert (capacity.tokens, capacity.num_blocks) == (884_736, 27_648)
    assert capacity.sequences(8192) == 108
    half = capacity_of(60 * GIB, 0.9, bytes_per_token(32, 8, 128, 2), 32)
    assert bytes_per_token(32, 8, 128, 2) == 128 * 1024 and half.sequences(8192) == 54


@pytest.mark.parametrize(("length", "count"), [(1, 10), (32, 10), (33, 5), (320, 1), (321, 0)])
def test_sequences_are_counted_in_whole_blocks(length: int, count: int) -> None:
    assert KvCapacity(10, 32, 1).sequences(length) == count


def test_less_than_a_block_is_none() -> None:
    assert capacity_of(1000, 0.9, 100, 32).num_blocks == 0


def test_the_start_up_line_has_blocks_tokens_and_bytes() -> None:
    line = str(capacity_of(60 * GIB, 0.9, 65_536, 32))
    assert "27648 blocks of 32 tokens" in line and "884736 tokens" in line and f"{54 * GIB} bytes" in line
