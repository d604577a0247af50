"""The small kernels around products and attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.decode_attention import Heads, partner_of


@triton.jit
def _rms_norm_kernel(x_ptr, gain_ptr, out_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, BLOCK)
    ok = i < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + i, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    y = (x * scale).to(out_ptr.dtype.element_ty) * tl.load(gain_ptr + i, mask=ok, other=0.0)
    tl.store(out_ptr + row + i, y.to(out_ptr.dtype.element_ty), mask=ok)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """out = x / rms(x) * gain, row by row of x [M, N]."""
    rows, width = x.shape
    extra = {"launch_pdl": True} if pdl else {}
    _rms_norm_kernel[(rows,)](
        x, gain, out, eps, N=width, BLOCK=triton.next_power_of_2(width), PDL=pdl,
        num_warps=8 if width >= 2048 else 4, **extra,
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * N + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + i, (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=ok)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """out [M, N] = silu(gate) * up of gate_up [M, 2 N]."""
    rows, width = out.shape
    block = min(2048, triton.next_power_of_2(width))
    extra = {"launch_pdl": True} if pdl else {}
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](
        gate_up, out, N=width, BLOCK=block, PDL=pdl, num_warps=8 if block >= 1024 else 4, **extra
    )
    return out


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, position_ptr, slot_ptr, turned_ptr, k_ptr, v_ptr,
    eps, page_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, QK_NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, DIM)[None, :]
    half: tl.constexpr = ROT // 2
    partner = partner_of(d, ROT)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    turns = (head < HEADS + KV_HEADS)[:, None]
    row = qkv_ptr + t * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM
    x = tl.load(row + d, mask=turns | is_value[:, None], other=0.0).to(tl.float32)
    y = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        gain = tl.where(is_query[:, None], tl.load(query_norm_ptr + d), tl.load(key_norm_ptr + d)).to(tl.float32)
        gain_y = tl.where(is_query[:, None], tl.load(query_norm_ptr + partner), tl.load(key_norm_ptr + partner))
        x = tl.where(turns, x * scale * gain, x)
        y = y * scale * gain_y.to(tl.float32)
    angle = tl.load(position_ptr + t) * half + tl.where(d < half, d, d - half)
    cos = tl.load(cos_ptr + angle, mask=d < ROT, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=d < ROT, other=0.0)
    x = tl.where(turns, x * cos + tl.where(d < half, -y, y) * sin, x).to(qkv_ptr.dtype.element_ty)
    tl.store(turned_ptr + t * ((HEADS + KV_HEADS) * DIM) + head[:, None] * DIM + d, x, mask=turns)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    if slot >= 0:
        if FP8:
            stored = tl.clamp(x.to(tl.float32), -448.0, 448.0).to(k_ptr.dtype.element_ty)
        else:
            stored = x.to(k_ptr.dtype.element_ty)
        at = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
        tl.store(k_ptr + at + (head - HEADS)[:, None] * head_stride + d, stored, mask=is_key[:, None])
        tl.store(v_ptr + at + (head - HEADS - KV_HEADS)[:, None] * head_stride + d, stored, mask=is_value[:, None])


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turned: torch.Tensor,
    heads: Heads,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates (and normalises) the heads of qkv [T, (heads + 2 kv_heads) * dim] at `positions` [T] int32: queries and
    keys to `turned` [T, (heads + kv_heads) * dim], K and V to `slots` [T] int32 of one layer of the pool (negative: not
    stored)."""
    total = heads.heads + 2 * heads.kv_heads
    block = min(16, triton.next_power_of_2(total))
    _rope_and_store_kernel[(qkv.shape[0], triton.cdiv(total, block))](
        qkv, heads.cos, heads.sin, qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm,
        positions, slots, turned, keys, values, heads.eps, keys.stride(0), keys.stride(1), keys.stride(2),
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, DIM=heads.dim, ROT=heads.rotary_dim, PAGE=keys.shape[1],
        BLOCK_H=block, QK_NORM=query_norm is not None, FP8=keys.dtype == torch.float8_e4m3fn, num_warps=4,
    )  # fmt: skip
    return turned


@triton.jit
def _argmax_kernel(
    logits_ptr, token_ptr, best_ptr, partial_ptr, index_ptr, arrived_ptr, n,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    per = tl.cdiv(tl.cdiv(n, PARTS), BLOCK) * BLOCK
    best = -float("inf")
    where = n
    for start in range(part * per, tl.minimum(part * per + per, n), BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * n + i, mask=i < n, other=-float("inf"))
        x = tl.where(x == x, x, float("inf"))  # NaN must not hide behind a finite best
        top = tl.max(x, 0)
        at = tl.min(tl.where(x == top, i, n), 0)
        where = tl.where(top > best, at, where)
        best = tl.maximum(best, top)
    tl.store(partial_ptr + row * PARTS + part, best)
    tl.store(index_ptr + row * PARTS + part, where)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == PARTS - 1:
        p = tl.arange(0, PARTS)
        x = tl.load(partial_ptr + row * PARTS + p, cache_modifier=".cg")
        i = tl.load(index_ptr + row * PARTS + p, cache_modifier=".cg")
        top = tl.max(x, 0)
        tl.store(best_ptr + row, top)
        tl.store(token_ptr + row, tl.minimum(tl.min(tl.where(x == top, i, n), 0), n - 1).to(tl.int64))
        tl.store(arrived_ptr + row, 0)


class Argmax:
    """The best token of each row of logits. Holds its scratch memory; one stream at a time."""

    PARTS = 128

    def __init__(self, rows: int, device: torch.device) -> None:
        self.partial = torch.empty(rows, self.PARTS, dtype=torch.float32, device=device)
        self.index = torch.empty(rows, self.PARTS, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, pdl: bool = False) -> None:
        """tokens [B] int64: the lowest id of the best logit of logits [B, V] float32; best [B] float32: that logit, or
        infinity where the row holds NaN."""
        extra = {"launch_pdl": True} if pdl else {}
        _argmax_kernel[(logits.shape[0], self.PARTS)](
            logits, tokens, best, self.partial, self.index, self.arrived, logits.shape[1],
            BLOCK=1024, PARTS=self.PARTS, PDL=pdl, num_warps=4, **extra,
        )  # fmt: skip


__all__ = ["Argmax", "rms_norm", "rope_and_store", "silu_mul"]
