"""The paged pool's layout over foreign memory, and paged attention against a plain float64 computation."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import StepMeta, fresh_tails, paged_attention
from engine.kv_pool import KvPool, dtype_named
from engine.step import Chunk

SHAPE = (3, 4, 2, 8)  # layers, page, kv heads, head dim


def pool_of(blocks: int, page: int = 4, dtype: torch.dtype = torch.float32) -> KvPool:
    shape = (SHAPE[0], page, SHAPE[2], SHAPE[3])
    buffer = bytearray(blocks * KvPool.bytes_per_block(*shape, dtype))
    return KvPool(buffer, blocks, *shape, dtype)


def test_one_block_is_one_run_of_bytes_in_the_documented_order() -> None:
    pool = pool_of(5)
    assert pool.block_bytes == 3 * 2 * 4 * 2 * 8 * 4
    pool.write(2, torch.tensor([3 * 4 + 1]), torch.full((1, 2, 8), 7.0), torch.full((1, 2, 8), 9.0))
    flat = pool.blocks.flatten()
    token = 2 * 8
    key_at = 3 * pool.block_bytes // 4 + (2 * 2 + 0) * 4 * token + 1 * token
    value_at = 3 * pool.block_bytes // 4 + (2 * 2 + 1) * 4 * token + 1 * token
    assert flat.nonzero().flatten().tolist() == [*range(key_at, key_at + 16), *range(value_at, value_at + 16)]
    assert set(flat[key_at : key_at + 16].tolist()) == {7.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_mapping_of_the_memory_sees_the_writes(dtype: torch.dtype) -> None:
    size = 4 * KvPool.bytes_per_block(*SHAPE, dtype)
    fd = os.memfd_create("kv")
    os.ftruncate(fd, size)
    ours, theirs = mmap.mmap(fd, size), mmap.mmap(fd, size)
    os.close(fd)
    pool = KvPool(memoryview(ours), 4, *SHAPE, dtype)
    pool.blocks[2].fill_(1.5)
    other = torch.frombuffer(theirs, dtype=dtype).view(4, -1)
    assert other[2].eq(1.5).all() and not other[[0, 1, 3]].any()


def test_the_buffer_must_be_large_enough() -> None:
    with pytest.raises(ValueError, match="buffer: 100 bytes cannot hold 2 blocks of 1536"):
        KvPool(bytearray(100), 2, *SHAPE, torch.float32)
    with pytest.raises(ValueError, match="cannot hold 0 blocks"):
        KvPool(bytearray(100), 0, *SHAPE, torch.float32)


def test_copy_block_copies_all_layers_and_nothing_else() -> None:
    pool = pool_of(3)
    pool.blocks[0] = torch.randn_like(pool.blocks[0])
    pool.copy_block(0, 2)
    assert torch.equal(pool.blocks[0], pool.blocks[2]) and not pool.blocks[1].any()
    assert "3 blocks of 1536 bytes" in repr(pool)


def test_dtype_names() -> None:
    assert dtype_named("auto") is torch.float32 and dtype_named("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="allowed: auto, float32"):
        dtype_named("int8")


# ---------------------------------------------------------------- tails


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 3, [(10, 3)]),
        (0, 4, []),
        (0, 6, [(11, 2)]),
        (3, 1, []),
        (4, 1, [(11, 1)]),
        (5, 1, []),  # the block was begun, and cleared, by an earlier step
        (2, 3, [(11, 1)]),
        (2, 1, []),
    ],
)
def test_a_tail_is_cleared_by_the_step_that_begins_its_block(
    start: int, count: int, expected: list[tuple[int, int]]
) -> None:
    assert fresh_tails([Chunk([1] * count, start, [10, 11, 12], True)], page=4) == expected


def test_clearing_reaches_all_layers_from_the_offset_on() -> None:
    pool = pool_of(3)
    pool.blocks.fill_(torch.nan)
    pool.clear_tails([(1, 3)])
    assert not pool.blocks[1, :, :, 3:].any()
    assert pool.blocks[1, :, :, :3].isnan().all() and pool.blocks[[0, 2]].isnan().all()


# ---------------------------------------------------------------- attention


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """query [n, heads, dim] at positions start .. start + n over keys, values [start + n, kv_heads, dim]."""
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(repeat, 1), values.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,shd->hns", query.double(), keys) * scale
    hidden = torch.ones(query.shape[0], keys.shape[0], dtype=torch.bool).triu(start + 1)
    return torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@settings(deadline=None, max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    page=st.sampled_from([1, 4, 32]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_paged_attention_matches_float64(spans: list[tuple[int, int]], page: int, group: int, seed: int) -> None:
    """Any mix of decodes (one token) and chunks with a prefix, each over blocks in random places."""
    generator = torch.Generator().manual_seed(seed)
    need = [-(-(start + count) // page) for start, count in spans]
    places = torch.randperm(sum(need) + 3, generator=generator).tolist()
    tables = [[places.pop() for _ in range(count)] for count in need]
    pool = pool_of(sum(need) + 3, page)
    chunks = [Chunk([0] * count, start, table, True) for (start, count), table in zip(spans, tables, strict=True)]
    _, meta = StepMeta.of(chunks, page)
    history = []
    for (start, count), table in zip(spans, tables, strict=True):
        keys, values = (torch.randn(start + count, 2, 8, generator=generator) for _ in "kv")
        slots = torch.tensor([table[at // page] * page + at % page for at in range(start + count)])
        pool.write(1, slots, keys, values)
        history.append((keys, values))
    query = torch.randn(len(meta.positions), 2 * group, 8, generator=generator)
    out = paged_attention(query, pool, 1, meta, 0.4)
    for last, (start, count), (keys, values) in zip(meta.wanted.tolist(), spans, history, strict=True):
        rows = slice(last - count + 1, last + 1)
        expected = plain_attention(query[rows], keys, values, start, 0.4)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    lengths = [1, 2, 30, 33, 64, 500, 900]
    chunks = [Chunk([0], length - 1, list(range(-(-length // 4))), True) for length in lengths]
    _, meta = StepMeta.of(chunks, 4)
    padded = sum(group.tables.numel() for group in meta.decodes)
    assert padded <= 2 * sum(-(-length // 4) for length in lengths)
    assert sorted(row for group in meta.decodes for row in group.rows.tolist()) == list(range(7))
