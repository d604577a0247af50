"""Causal attention of packed prompt chunks over the paged KV pool, which holds the chunks' own K and V already.

All that differs from step to step is read from device memory, so that a launch can be part of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.decode_attention import Heads


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, length_ptr, out_ptr,
    scale, query_stride, page_stride, token_stride, head_stride, table_stride, sequences,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The rows of a tile are TOKENS tokens of all query heads of one KV head, so K and V are read once a group.
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # The last tiles see the most keys: started first, they do not leave a tail.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    h = tl.program_id(0)
    low = 0
    high = sequences
    while low < high:  # the last sequence whose tiles begin at or before this one
        middle = (low + high) // 2
        if tl.load(start_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    b = low - 1
    packed = tl.load(start_ptr + b)
    count = tl.load(start_ptr + b + 1) - packed
    first = (tile - (packed // TOKENS + b)) * TOKENS
    if first < count:
        length = tl.load(length_ptr + b)
        r = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DIM)
        j = tl.arange(0, BLOCK_N)
        token = first + r // GROUP
        head = h * GROUP + r % GROUP
        row_ok = (token < count) & (r < TOKENS * GROUP)
        at = (packed + token).to(tl.int64)[:, None] * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
        query_at = (packed + token).to(tl.int64)[:, None] * query_stride + head[:, None] * DIM + d[None, :]
        q = tl.load(q_ptr + query_at, mask=row_ok[:, None], other=0.0)
        if FP8:
            q = (q.to(tl.float32) * (scale * 1.4426950408889634)).to(tl.float16)
        else:
            q = (q.to(tl.float32) * (scale * 1.4426950408889634)).to(q_ptr.dtype.element_ty)
        position = length - count + token
        m = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        whole = (length - count + first) // BLOCK_N * BLOCK_N
        end = tl.minimum(length, length - count + first + TOKENS)
        k_base = k_ptr + h * head_stride
        v_base = v_ptr + h * head_stride
        for i in range(0, whole, BLOCK_N):  # keys that every row sees
            page = tl.load(table_ptr + b * table_stride + (i + j) // PAGE).to(tl.int64)
            key_at = page * page_stride + ((i + j) % PAGE) * token_stride
            k = tl.load(k_base + key_at[None, :] + d[:, None]).to(q.dtype)
            score = tl.dot(q, k, input_precision=PRECISION)
            best = tl.maximum(m, tl.max(score, 1))
            p = tl.exp2(score - best[:, None])
            shrink = tl.exp2(m - best)
            total = total * shrink + tl.sum(p, 1)
            v = tl.load(v_base + key_at[:, None] + d[None, :]).to(q.dtype)
            acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            m = best
        for i in range(whole, end, BLOCK_N):  # the diagonal
            seen = i + j < length
            page = tl.load(table_ptr + b * table_stride + (i + j) // PAGE, mask=seen, other=0).to(tl.int64)
            key_at = page * page_stride + ((i + j) % PAGE) * token_stride
            k = tl.load(k_base + key_at[None, :] + d[:, None], mask=seen[None, :], other=0.0).to(q.dtype)
            score = tl.dot(q, k, input_precision=PRECISION)
            score = tl.where(((i + j)[None, :] <= position[:, None]) & seen[None, :], score, -1e30)
            best = tl.maximum(m, tl.max(score, 1))
            p = tl.exp2(score - best[:, None])
            shrink = tl.exp2(m - best)
            total = total * shrink + tl.sum(p, 1)
            v = tl.load(v_base + key_at[:, None] + d[None, :], mask=seen[:, None], other=0.0).to(q.dtype)
            acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            m = best
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row_ok[:, None])


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    heads: Heads,
    out: torch.Tensor,
    *,
    block_m: int = 64,
    block_n: int = 64,
    warps: int = 4,
    stages: int = 2,
) -> torch.Tensor:
    """Attended rows `out` [T, heads * dim] of rotated queries [T, heads * dim] (rows may be strided).

    Sequence b owns the packed rows starts[b] .. starts[b + 1] (int32 [B + 1]); they are the last of its `lengths[b]`
    (int32 [B]) tokens. Empty sequences are allowed at the end. `keys`, `values`, `tables` as in decode_attention. Rows
    beyond starts[B] are left as they are.
    """
    group = heads.heads // heads.kv_heads
    wide = query.dtype == torch.float32  # twice the bytes a tile
    if wide:
        block_n = min(block_n, 32)
    block_m = max(block_m, triton.next_power_of_2(group))
    sequences = len(lengths)
    _prefill_kernel[(heads.kv_heads, query.shape[0] // (block_m // group) + sequences)](
        query, keys, values, tables, starts, lengths, out,
        heads.scale, query.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0), sequences,
        HEADS=heads.heads, GROUP=group, DIM=heads.dim, PAGE=keys.shape[1], BLOCK_M=block_m, BLOCK_N=block_n,
        FP8=keys.dtype == torch.float8_e4m3fn, PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
