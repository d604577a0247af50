"""The Triton kernels against plain torch in float64, on the device if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU the kernels run only under TRITON_INTERPRET=1", allow_module_level=True)

from engine.kernels.decode_attention import Cut, DecodeScratch, Heads, decode_attention, store_staged
from engine.kernels.elementwise import Argmax, rms_norm, rope_and_store, silu_mul
from engine.kernels.linear import SplitScratch, Tile, linear
from engine.kernels.prefill_attention import prefill_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies the bit patterns of bfloat16."""
PAGE = 8
HIGH = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2, torch.float8_e4m3fn: 2e-2}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, Tile(8, 64)),
        (1, Tile(16, 64)),
        (3, Tile(16, 32)),
        (17, Tile(32, 32)),
    ],
)
@pytest.mark.parametrize("k", [64, 72])
@pytest.mark.parametrize("form", ["plain", "norm", "add", "silu", "bias", "norm-silu-bias"])
def test_linear(rows: int, tile: Tile, k: int, form: str, dtype: torch.dtype) -> None:
    n = 48
    silu = "silu" in form
    x, w = random(rows, k, dtype=dtype), random(2 * n if silu else n, k, dtype=dtype, seed=1)
    gain = random(k, dtype=dtype, seed=2) if "norm" in form else None
    bias = random(len(w), dtype=dtype, seed=3) if "bias" in form else None
    out = (
        random(rows, n, dtype=dtype, seed=4)
        if form == "add"
        else torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)
    )
    rows_in = x.double()
    if gain is not None:
        rows_in = F.rms_norm(rows_in, (k,), gain.double(), 1e-5)
    want = F.linear(rows_in, w.double(), None if bias is None else bias.double())
    if silu:
        want = F.silu(want[:, :n]) * want[:, n:]
    if form == "add":
        want = want + out.double()
    linear(x, w, out, tile, bias=bias, norm=gain, eps=1e-5, add=form == "add", silu=silu)
    assert error(out, want) < HIGH[dtype]


@pytest.mark.parametrize("rows", [1, 5])
def test_split_product_adds_its_parts_and_resets_its_counters(rows: int) -> None:
    scratch = SplitScratch(DEVICE, floats=1 << 16, tiles=64)
    x, w = random(rows, 96), random(40, 96, seed=1)
    for _ in range(2):
        out = random(rows, 40, seed=2)
        want = out.double() + x.double() @ w.double().t()
        linear(x, w, out, Tile(16, 16, split=2), add=True, scratch=scratch)
        assert error(out, want) < 1e-5
    assert not scratch.arrived.any()


class Paged:
    """Sequences of random tokens in a scattered pool: one layer of two."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        kv: torch.dtype,
        rotary: int | None = None,
    ) -> None:
        rotary = rotary or dim
        angles = torch.arange(256.0)[:, None] * 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
        self.heads = Heads(
            heads, kv_heads, dim, rotary, dim**-0.5, 1e-6, angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        )
        self.lengths, self.dtype, self.kv = lengths, dtype, kv
        count = [-(-max(length, 1) // PAGE) for length in lengths]
        order = torch.randperm(sum(count) + 3, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = torch.zeros(len(lengths), max(count), dtype=torch.int32)
        for row, blocks in enumerate(count):
            self.tables[row, :blocks] = torch.tensor([order.pop() for _ in range(blocks)])
        self.tables = self.tables.to(DEVICE)
        pool = torch.full((sum(count) + 3, 2, 2, PAGE, kv_heads, dim), torch.nan)
        self.pool = pool.to(kv).to(DEVICE)
        self.qkv = [random(max(n, 1), (heads + 2 * kv_heads) * dim, dtype=dtype, seed=n) for n in lengths]

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return (self.tables[row, positions // PAGE] * PAGE + positions.to(DEVICE) % PAGE).to(torch.int32)

    def store(self, row: int, begin: int, end: int, norms: Any = (None, None)) -> torch.Tensor:
        """Stores tokens begin .. end of a sequence; their rotated queries."""
        positions = torch.arange(begin, end, dtype=torch.int32)
        heads, kv_heads, dim = self.heads.heads, self.heads.kv_heads, self.heads.dim
        turned = torch.full((end - begin, (heads + kv_heads) * dim), torch.nan, dtype=self.dtype, device=DEVICE)
        slots = self.slots(row, positions.long())
        rope_and_store(
            self.qkv[row][begin:end].contiguous(),
            positions.to(DEVICE),
            slots,
            self.pool[:, 1, 0],
            self.pool[:, 1, 1],
            turned,
            self.heads,
            *norms,
        )
        return turned[:, : heads * dim].contiguous()

    def reference(self, row: int, norms: Any = (None, None)) -> torch.Tensor:
        """Attended rows of a whole sequence in float64; K and V rounded as the pool rounds them."""
        h, length = self.heads, self.lengths[row]
        x = self.qkv[row][:length].double().view(length, -1, h.dim)
        q, k, v = x[:, : h.heads], x[:, h.heads : h.heads + h.kv_heads], x[:, h.heads + h.kv_heads :]
        q, k = (
            part if norm is None else F.rms_norm(part, (h.dim,), norm.double(), h.eps)
            for part, norm in zip((q, k), norms, strict=True)
        )
        q, k = (self._turn(part).to(self.dtype) for part in (q, k))
        k, v = (part.to(self.dtype).to(self.kv).double() for part in (k, v))
        q = q.double()
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(h.heads // h.kv_heads, 0),
            v.transpose(0, 1).repeat_interleave(h.heads // h.kv_heads, 0),
            is_causal=True,
            scale=h.scale,
        )
        return out.transpose(0, 1).reshape(length, -1)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        half = self.heads.rotary_dim // 2
        cos, sin = self.heads.cos[: len(x), None].double(), self.heads.sin[: len(x), None].double()
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


SHAPES = [
    pytest.param((6, 2, 32, torch.float32, torch.float32), id="fp32"),
    pytest.param((8, 2, 32, HALF, HALF), id="half"),
    pytest.param((4, 4, 16, torch.float32, torch.float32, 8), id="partial-rotary"),
    pytest.param((4, 1, 32, HALF, torch.float8_e4m3fn), id="fp8"),
]


@pytest.fixture(autouse=True)
def _fp8_needs_a_device(request: pytest.FixtureRequest) -> None:
    if "fp8" in request.node.name and DEVICE.type == "cpu":
        pytest.skip("the interpreter does not convert e4m3")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cut", [Cut(1, 16), Cut(2, 16), Cut(8, 16, ahead=True)])
@pytest.mark.parametrize("normed", [False, True])
def test_decode_attends_to_the_pool_and_the_new_token(shape: Any, cut: Cut, normed: bool) -> None:
    lengths = [1, 2, 33, 70, 0, PAGE + 1]
    paged = Paged(lengths, *shape)
    h = paged.heads
    norms = (random(h.dim, dtype=paged.dtype), random(h.dim, dtype=paged.dtype, seed=1)) if normed else (None, None)
    for row, length in enumerate(lengths):
        if length > 1:
            paged.store(row, 0, length - 1, norms)
    qkv = torch.stack([rows[max(n, 1) - 1] for rows, n in zip(paged.qkv, lengths, strict=True)])
    staged = torch.zeros(len(lengths), 2, 2, h.kv_heads, h.dim).to(paged.kv).to(DEVICE)
    out = torch.full((len(lengths), h.heads * h.dim), torch.nan, dtype=paged.dtype, device=DEVICE)
    scratch = DecodeScratch(len(lengths), h, cut.splits, DEVICE)
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    decode_attention(
        qkv,
        paged.pool[:, 1, 0],
        paged.pool[:, 1, 1],
        paged.tables,
        lens,
        staged[:, 1],
        out,
        h,
        scratch,
        query_norm=norms[0],
        key_norm=norms[1],
        cut=cut,
    )
    for row, length in enumerate(lengths):
        if length:
            assert error(out[row], paged.reference(row, norms)[-1]) < HIGH[paged.kv], length
    assert not out[lengths.index(0)].any()
    assert not scratch.arrived.any()
    slots = torch.cat(
        [
            paged.slots(r, torch.tensor([n - 1])) if n > 1 else torch.tensor([-1], dtype=torch.int32, device=DEVICE)
            for r, n in enumerate(lengths)
        ]
    )
    before = paged.pool.clone()
    store_staged(staged, paged.pool, slots)
    for row, length in enumerate(lengths):
        if length > 1:
            paged_now, slot = paged.pool.clone(), int(slots[row])
            paged.store(row, length - 1, length, norms)
            stored, want = (pool[slot // PAGE, 1, :, slot % PAGE].float() for pool in (paged_now, paged.pool))
            assert torch.allclose(stored, want, rtol=0.07 if paged.kv.itemsize == 1 else 1e-2, atol=1e-6)
    untouched = before.view(torch.uint8) == paged.pool.view(torch.uint8)
    assert untouched.float().mean() > 0.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [5, 200])
def test_prefill_in_chunks_of_several_sequences(shape: Any, chunk: int) -> None:
    lengths = [37, 3, 90]
    paged = Paged(lengths, *shape)
    wanted = [paged.reference(row) for row in range(3)]
    for begin in range(0, max(lengths), chunk):
        spans = [(row, begin, min(begin + chunk, n)) for row, n in enumerate(lengths) if n > begin]
        query = torch.cat([paged.store(row, a, e) for row, a, e in spans])
        query = torch.cat((query, query[:2]))  # rows of no sequence
        starts = torch.tensor([0, *(e - a for _, a, e in spans), 0]).cumsum(0).to(torch.int32).to(DEVICE)
        ends = torch.tensor([e for _, _, e in spans] + [0], dtype=torch.int32, device=DEVICE)
        tables = paged.tables[[*(row for row, _, _ in spans), 0]]
        out = torch.full_like(query, torch.nan)
        prefill_attention(
            query, paged.pool[:, 1, 0], paged.pool[:, 1, 1], tables, starts, ends, paged.heads, out, block_n=16
        )
        for at, (row, a, e) in zip(starts.tolist(), spans, strict=False):
            assert error(out[at : at + e - a], wanted[row][a:e]) < HIGH[paged.kv]
        assert out[-2:].isnan().all()


def test_rms_norm_and_silu_mul() -> None:
    x, gain = random(5, 72), random(72, seed=1)
    got = rms_norm(x, gain, 1e-5, torch.empty_like(x))
    assert error(got, F.rms_norm(x.double(), (72,), gain.double(), 1e-5)) < 1e-6
    both = random(5, 144)
    got = silu_mul(both, torch.empty(5, 72, device=DEVICE))
    assert error(got, F.silu(both[:, :72].double()) * both[:, 72:].double()) < 1e-6


def test_argmax_takes_the_lowest_of_equals_and_tells_nan() -> None:
    logits = random(5, 5000)
    logits[1, [4999, 70, 3000]] = 50.0
    logits[2, 17] = torch.nan
    logits[3] = -torch.inf
    argmax = Argmax(5, DEVICE)
    for _ in range(2):
        tokens, best = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.zeros(5, device=DEVICE)
        argmax(logits, tokens, best)
        assert tokens[[0, 4]].tolist() == logits[[0, 4]].argmax(-1).tolist()
        assert tokens[1] == 70 and best[1] == 50
        assert best.isfinite().tolist() == [True, True, False, False, True]
        assert 0 <= int(tokens[3]) < 5000
