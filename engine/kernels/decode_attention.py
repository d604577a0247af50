"""Attention of one new token a sequence over the paged KV pool.

One launch rotates the query and key heads (and normalises them, where the model does), stages the new token's K and V,
attends to the pool's tokens and the new one, and joins the splits of a sequence. The pool itself is not written: the
new token is attended to from registers, and `store_staged` moves it to its slot once the step counts.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl


@triton.jit
def partner_of(dims, ROT: tl.constexpr):
    """The dimension that rotates together with each of `dims`; beyond ROT each is its own."""
    half: tl.constexpr = ROT // 2
    return tl.where(dims < half, dims + half, tl.where(dims < ROT, dims - half, dims))


@triton.jit
def turned(x, y, dims, cos, sin, gain_ptr, eps, DIM: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr):
    """Heads x [..., DIM] and their partners y, normalised if NORM, then rotated; in float32."""
    half: tl.constexpr = ROT // 2
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = (x * scale) * tl.load(gain_ptr + dims).to(tl.float32)
        y = (y * scale) * tl.load(gain_ptr + partner_of(dims, ROT)).to(tl.float32)
    return x * cos + tl.where(dims < half, -y, y) * sin


@triton.jit
def _attend(q, k, v, ok, m, total, acc, PRECISION: tl.constexpr):
    """Online softmax: takes keys k [DIM, N] and values v [N, DIM], of which those that are `ok` count."""
    score = tl.where(ok[None, :], tl.dot(q, k, input_precision=PRECISION), -1e30)
    best = tl.maximum(m, tl.max(score, 1))
    p = tl.exp2(score - best[:, None])
    shrink = tl.exp2(m - best)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v, input_precision=PRECISION)
    return best, total, acc


@triton.jit
def _decode_kernel(
    qkv_ptr, k_ptr, v_ptr, table_ptr, length_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr,
    staged_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr,
    scale, eps, page_stride, token_stride, head_stride, table_stride, staged_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, GROUP_POW: tl.constexpr,
    DIM: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    QK_NORM: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    length = tl.load(length_ptr + b)
    past = length - 1  # tokens in the pool
    used = tl.maximum(1, tl.minimum(SPLITS, tl.cdiv(past, BLOCK_N)))
    g = tl.arange(0, GROUP_DOT)
    d = tl.arange(0, DIM)
    t = tl.arange(0, BLOCK_N)
    group_ok = (g < GROUP)[:, None]
    head = h * GROUP + g
    out = out_ptr + b.to(tl.int64) * (HEADS * DIM)
    per = tl.cdiv(tl.cdiv(past, used), BLOCK_N) * BLOCK_N
    begin = s * per
    end = tl.minimum(begin + per, past)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:  # the pool's K and V do not depend on the kernel that is waited for
        first_ok = begin + t < end
        page = tl.load(table_ptr + b * table_stride + (begin + t) // PAGE, mask=first_ok, other=0).to(tl.int64)
        at = page * page_stride + ((begin + t) % PAGE) * token_stride + h * head_stride
        first_k = tl.load(k_ptr + at[None, :] + d[:, None], mask=first_ok[None, :], other=0.0)
        first_v = tl.load(v_ptr + at[:, None] + d[None, :], mask=first_ok[:, None], other=0.0)
    half: tl.constexpr = ROT // 2
    dims = d[None, :]
    partner = partner_of(dims, ROT)
    angle = tl.maximum(past, 0) * half + tl.where(dims < half, dims, dims - half)
    cos = tl.load(cos_ptr + angle, mask=dims < ROT, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=dims < ROT, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if length <= 0:
        if s == 0:  # a padding row: finite, so that nothing downstream sees NaN
            zero = tl.zeros([GROUP_DOT, DIM], out_ptr.dtype.element_ty)
            tl.store(out + head[:, None] * DIM + d[None, :], zero, mask=group_ok)
    elif s < used:
        # All loads before the first use: their latencies then overlap.
        row = qkv_ptr + b.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        q_at = row + head[:, None] * DIM
        k_at = row + (HEADS + h) * DIM
        x = tl.load(q_at + dims, mask=group_ok, other=0.0)
        y = tl.load(q_at + partner, mask=group_ok, other=0.0)
        new_x = tl.load(k_at + dims)
        new_y = tl.load(k_at + partner)
        new_v = tl.load(row + (HEADS + KV_HEADS + h) * DIM + dims)
        q = turned(x, y, dims, cos, sin, query_norm_ptr, eps, DIM, ROT, QK_NORM)
        q = q.to(qkv_ptr.dtype.element_ty).to(tl.float32) * (scale * 1.4426950408889634)
        if FP8:  # noqa: SIM108 - decided at compile time, and the branches have different types
            q = q.to(tl.float16)  # e4m3 converts exactly and fast to float16, not to bfloat16
        else:
            q = q.to(qkv_ptr.dtype.element_ty)
        m = tl.full([GROUP_DOT], -1e30, tl.float32)
        total = tl.zeros([GROUP_DOT], tl.float32)
        acc = tl.zeros([GROUP_DOT, DIM], tl.float32)
        if s == 0:
            new_k = turned(new_x, new_y, dims, cos, sin, key_norm_ptr, eps, DIM, ROT, QK_NORM)
            key = new_k.to(qkv_ptr.dtype.element_ty)
            if FP8:
                key = tl.clamp(key.to(tl.float32), -448.0, 448.0).to(k_ptr.dtype.element_ty)
                value = tl.clamp(new_v.to(tl.float32), -448.0, 448.0).to(k_ptr.dtype.element_ty)
            else:
                value = new_v
            staged = staged_ptr + b.to(tl.int64) * staged_stride + h * DIM
            tl.store(staged + dims, key)
            tl.store(staged + KV_HEADS * DIM + dims, value)
            m = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1)
            total = tl.full([GROUP_DOT], 1.0, tl.float32)
            acc = acc + value.to(tl.float32)
        rest = begin
        if AHEAD:
            m, total, acc = _attend(q, first_k.to(q.dtype), first_v.to(q.dtype), first_ok, m, total, acc, PRECISION)
            rest = begin + BLOCK_N
        for i in range(rest, end, BLOCK_N):
            token = i + t
            ok = token < end
            page = tl.load(table_ptr + b * table_stride + token // PAGE, mask=ok, other=0).to(tl.int64)
            at = page * page_stride + (token % PAGE) * token_stride + h * head_stride
            k = tl.load(k_ptr + at[None, :] + d[:, None], mask=ok[None, :], other=0.0).to(q.dtype)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=ok[:, None], other=0.0).to(q.dtype)
            m, total, acc = _attend(q, k, v, ok, m, total, acc, PRECISION)
        result = acc / tl.maximum(total, 1e-30)[:, None]
        if SPLITS == 1 or used == 1:
            tl.store(out + head[:, None] * DIM + d[None, :], result.to(out_ptr.dtype.element_ty), mask=group_ok)
        else:
            group = b * KV_HEADS + h
            cell = (group * SPLITS + s) * GROUP + g
            tl.store(partial_ptr + cell[:, None].to(tl.int64) * DIM + d[None, :], result, mask=group_ok)
            lse = tl.where(total > 0, m + tl.log2(tl.maximum(total, 1e-30)), -1e30)
            tl.store(lse_ptr + cell, lse, mask=g < GROUP)
            tl.debug_barrier()
            # The program that arrives last joins the parts in their order: the sum does not depend on who was last.
            if tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") == used - 1:
                part = tl.arange(0, SPLITS)
                member = tl.arange(0, GROUP_POW)
                place = (group * SPLITS + part[:, None]) * GROUP + member[None, :]
                there = (part < used)[:, None] & (member < GROUP)[None, :]
                weight = tl.load(lse_ptr + place, mask=there, other=-1e30, cache_modifier=".cg")
                weight = tl.exp2(weight - tl.max(weight, 0)[None, :])
                weight = weight / tl.sum(weight, 0)[None, :]
                cells = partial_ptr + place[:, :, None].to(tl.int64) * DIM + tl.arange(0, DIM)[None, None, :]
                share = tl.load(cells, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
                joined = tl.sum(share * weight[:, :, None], 0)
                to = (h * GROUP + member)[:, None] * DIM + tl.arange(0, DIM)[None, :]
                tl.store(out + to, joined.to(out_ptr.dtype.element_ty), mask=(member < GROUP)[:, None])
                tl.store(arrived_ptr + group, 0)


@triton.jit
def _store_staged_kernel(
    staged_ptr, pool_ptr, slot_ptr, block_stride, ROW: tl.constexpr, ROW_POW: tl.constexpr, PAGE: tl.constexpr
):
    b = tl.program_id(0)
    plane = tl.program_id(1)  # layer * 2 + (0: K, 1: V)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    i = tl.arange(0, ROW_POW)
    if slot >= 0:
        row = tl.load(staged_ptr + (b * tl.num_programs(1) + plane).to(tl.int64) * ROW + i, mask=i < ROW, other=0)
        at = pool_ptr + (slot // PAGE) * block_stride + (plane * PAGE + slot % PAGE) * ROW
        tl.store(at + i, row, mask=i < ROW)


def store_staged(staged: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
    """Moves staged K and V [B, layers, 2, kv_heads, dim] of slots [<= B] (int32; negative: dropped) into the pool's
    `blocks` [num_blocks, layers, 2, page, kv_heads, dim]."""
    _, layers, _, page, heads, dim = blocks.shape
    as_bytes = torch.uint8 if staged.element_size() == 1 else torch.int16 if staged.element_size() == 2 else torch.int32
    _store_staged_kernel[(len(slots), layers * 2)](
        staged.view(as_bytes), blocks.view(as_bytes), slots, blocks.stride(0),
        ROW=heads * dim, ROW_POW=triton.next_power_of_2(heads * dim), PAGE=page, num_warps=1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """What rotation and attention need to know of a model."""

    heads: int
    kv_heads: int
    dim: int
    rotary_dim: int
    scale: float
    eps: float
    cos: torch.Tensor  # [positions, rotary_dim / 2] float32
    sin: torch.Tensor


class DecodeScratch:
    """Partial results of split sequences, shared by the layers of a step."""

    def __init__(self, rows: int, heads: Heads, max_splits: int, device: torch.device) -> None:
        cells = rows * heads.heads * max_splits
        self.partial = torch.empty(cells * heads.dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(cells, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * heads.kv_heads, dtype=torch.int32, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How the attention of a step is cut up: `splits` programs share a sequence's KV, `block_n` tokens at a time. With
    `ahead` a program has its first tokens loaded before the query is there."""

    splits: int = 2
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    ahead: bool = False


def cut_for(rows: int, kv_heads: int) -> Cut:
    """One-warp programs, enough of them to keep the memory busy; for very few rows larger ones, which have less to
    join. A sequence is cut no finer than that, but cut it is: lengths differ."""
    pairs = rows * kv_heads
    if pairs <= 16:
        return Cut(32, 64, 4, 2, ahead=True)
    splits = 1
    while pairs * splits < 1024 and splits < 16:
        splits *= 2
    return Cut(splits, 32, 1, 3)


def decode_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    staged: torch.Tensor,
    out: torch.Tensor,
    heads: Heads,
    scratch: DecodeScratch,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    cut: Cut,
    pdl: bool = False,
) -> torch.Tensor:
    """Attended rows `out` [B, heads * dim] of qkv [B, (heads + 2 kv_heads) * dim].

    `keys`, `values`: one layer of the pool, [blocks, page, kv_heads, dim], strided. `tables` [B, max_blocks] int32;
    `lengths` [B] int32 counts the new token (0: a padding row, attended to 0). The new token's K and V go to `staged`
    [B, 2, kv_heads, dim] (row-strided view of one layer).
    """
    group = heads.heads // heads.kv_heads
    fp8 = keys.dtype == torch.float8_e4m3fn
    extra = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(len(lengths), heads.kv_heads, cut.splits)](
        qkv, keys, values, tables, lengths, heads.cos, heads.sin,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm,
        staged, out, scratch.partial, scratch.lse, scratch.arrived,
        heads.scale, heads.eps, keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0), staged.stride(0),
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, GROUP=group, GROUP_DOT=max(16, triton.next_power_of_2(group)),
        GROUP_POW=triton.next_power_of_2(group), DIM=heads.dim, ROT=heads.rotary_dim, PAGE=keys.shape[1],
        BLOCK_N=cut.block_n, SPLITS=cut.splits, QK_NORM=query_norm is not None, FP8=fp8,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32", AHEAD=cut.ahead, PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, **extra,
    )  # fmt: skip
    return out
