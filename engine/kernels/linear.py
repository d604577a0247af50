"""Products of a few rows with a weight matrix [N, K], bound by reading the weights once.

One launch does what surrounds the product too: RMS-normalising the rows before it, adding the result to the residual
stream or multiplying gate and up after it. Under programmatic dependent launch a kernel starts while its predecessor
drains, and fetches its first weights into the L2 cache before it waits for the rows.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How one product is cut up. `block_n` output features and `block_k` inputs a tile; `split` programs share the
    inputs of one tile; loads run `stages` tiles ahead of the arithmetic; the first `ahead` inputs of a weight row are
    prefetched before the rows are there (0: none). Without `norms` the rows are normalised by a launch of their own:
    many rows are better read than normalised by every tile."""

    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    norms: bool = True


@triton.jit
def prefetch_l2(pointers, COUNT: tl.constexpr, BYTES: tl.constexpr):
    """Asks for BYTES bytes at each of COUNT `pointers`, a power of two; nothing waits for them. One thread asks for
    each: the elements of a short tensor lie in the first threads, and in others again."""
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.lt.u32 first, thread, $2;"
        " @first cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers.to(tl.int64), COUNT, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, out_ptr, n, k, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, ITEM: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    row_ok = rows < n
    weights = w_ptr + rows[:, None].to(tl.int64) * k + cols[None, :]
    up_offset = n.to(tl.int64) * k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            first = w_ptr + rows.to(tl.int64) * k
            prefetch_l2(first, BLOCK_N, AHEAD * ITEM)
            if SILU:
                prefetch_l2(first + up_offset, BLOCK_N, AHEAD * ITEM)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, loop_unroll_factor=UNROLL):
        if EVEN:
            w = tl.load(weights + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + cols).to(tl.float32)
        else:
            inside = row_ok[:, None] & (start + cols < k)[None, :]
            w = tl.load(weights + start, mask=inside, other=0.0)
            x = tl.load(x_ptr + start + cols, mask=start + cols < k, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            if EVEN:
                x = x * tl.load(norm_ptr + start + cols).to(tl.float32)
            else:
                x = x * tl.load(norm_ptr + start + cols, mask=start + cols < k, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if SILU:
            if EVEN:
                w = tl.load(weights + up_offset + start, eviction_policy="evict_first")
            else:
                w = tl.load(weights + up_offset + start, mask=inside, other=0.0)
            up += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    z = tl.sum(up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        y = y * scale
        z = z * scale
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)
        if SILU:
            z += tl.load(bias_ptr + n + rows, mask=row_ok, other=0.0).to(tl.float32)
    if SILU:
        y = _silu(y) * z
    if RESIDUAL:
        y += tl.load(out_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_ok)


@triton.jit
def _few_rows_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, out_ptr, partial_ptr, arrived_ptr, m, n, k, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, AHEAD: tl.constexpr, ITEM: tl.constexpr, PRECISION: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The product is computed transposed: weights are the left operand, so that its many rows fill the tensor cores.
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    row_ok = rows < m
    feature_ok = features < n
    per = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT) * BLOCK_K
    begin = part * per
    end = tl.minimum(begin + per, k)
    weights = w_ptr + features[:, None].to(tl.int64) * k + cols[None, :]
    up_offset = n.to(tl.int64) * k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            first = w_ptr + features.to(tl.int64) * k + begin
            prefetch_l2(first, BLOCK_N, AHEAD * ITEM)
            if SILU:
                prefetch_l2(first + up_offset, BLOCK_N, AHEAD * ITEM)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        col_ok = start + cols < end
        x_at = x_ptr + rows[None, :] * k + (start + cols)[:, None]
        if EVEN_K:
            x = tl.load(x_at, mask=row_ok[None, :], other=0.0)
        else:
            x = tl.load(x_at, mask=row_ok[None, :] & col_ok[:, None], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            if EVEN_K:
                gain = tl.load(norm_ptr + start + cols).to(tl.float32)
            else:
                gain = tl.load(norm_ptr + start + cols, mask=col_ok, other=0.0).to(tl.float32)
            x = (wide * gain[:, None]).to(x.dtype)
        if EVEN_N and EVEN_K:
            w = tl.load(weights + start, eviction_policy="evict_first")
        else:
            w = tl.load(weights + start, mask=feature_ok[:, None] & col_ok[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if SILU:
            if EVEN_N and EVEN_K:
                w = tl.load(weights + up_offset + start, eviction_policy="evict_first")
            else:
                w = tl.load(weights + up_offset + start, mask=feature_ok[:, None] & col_ok[None, :], other=0.0)
            up = tl.dot(w, x, up, input_precision=PRECISION)
    if NORM:
        scale = tl.rsqrt(squares / k + eps)
        acc = acc * scale[None, :]
        up = up * scale[None, :]
    last = True
    if SPLIT > 1:
        # The program that arrives last adds the parts in their order: the sum does not depend on who was last.
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows[None, :]
        stride: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial_ptr + (tile * SPLIT).to(tl.int64) * stride
        tl.store(mine + part * stride + cell, acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT):
                acc += tl.load(mine + other * stride + cell, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        if BIAS:
            acc += tl.load(bias_ptr + features, mask=feature_ok, other=0.0).to(tl.float32)[:, None]
            if SILU:
                up += tl.load(bias_ptr + n + features, mask=feature_ok, other=0.0).to(tl.float32)[:, None]
        if SILU:
            acc = _silu(acc) * up
        at = out_ptr + rows[None, :].to(tl.int64) * n + features[:, None]
        ok = row_ok[None, :] & feature_ok[:, None]
        if RESIDUAL:
            acc += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=ok)


class SplitScratch:
    """Partial sums and arrival counters of split products. Kernels of one stream may share it: each leaves the
    counters at zero."""

    def __init__(self, device: torch.device, floats: int = 1 << 23, tiles: int = 1 << 16) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    silu: bool = False,
    scratch: SplitScratch | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out = f(g(x) @ weight.T + bias) for x [M, K] of at most 128 rows, weight [N, K], out [M, N], all contiguous.

    g: RMS norm with gain `norm` [K], if given. f: with `add` the product is added to what `out` holds; with `silu`
    the weight is [2 N, K], gate above up, and out is silu(gate) * up. A split tile needs `scratch` and takes no norm.
    """
    (m, k), n = x.shape, out.shape[1]
    if x.element_size() > 2:  # the tile's inputs then take as much shared memory
        tile = dataclasses.replace(tile, block_k=max(16, tile.block_k // 2))
    even_k = k % (tile.block_k * tile.split) == 0
    even_n = n % tile.block_n == 0
    share = triton.cdiv(triton.cdiv(k, tile.block_k), tile.split) * tile.block_k
    ahead = min(tile.ahead, share) if even_n and even_k else 0
    unused = x  # a pointer that the kernel does not follow
    common = {
        "AHEAD": ahead, "ITEM": weight.element_size(), "NORM": norm is not None, "RESIDUAL": add, "SILU": silu,
        "BIAS": bias is not None, "PDL": pdl, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if pdl:
        common["launch_pdl"] = True
    bias_or_unused = unused if bias is None else bias
    norm_or_unused = unused if norm is None else norm
    if m == 1 and tile.split == 1:
        _one_row_kernel[(triton.cdiv(n, tile.block_n),)](
            x, weight, bias_or_unused, norm_or_unused, out, n, k, eps,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, UNROLL=tile.stages, EVEN=even_n and even_k, **common,
        )  # fmt: skip
        return out
    if tile.split > 1 and (scratch is None or norm is not None or silu):
        raise ValueError("a split product needs scratch memory and takes neither norm nor silu")
    partial = unused if scratch is None else scratch.partial
    arrived = unused if scratch is None else scratch.arrived
    _few_rows_kernel[(triton.cdiv(n, tile.block_n), tile.split)](
        x, weight, bias_or_unused, norm_or_unused, out, partial, arrived, m, n, k, eps,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split,
        EVEN_N=even_n, EVEN_K=even_k, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **common,
    )  # fmt: skip
    return out
