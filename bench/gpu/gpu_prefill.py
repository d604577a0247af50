"""The targets of one decode step and of a prefill chunk, and where the time of a chunk of 512 goes.

python bench/gpu/gpu_prefill.py

Each variant of a prefill is one CUDA graph of the whole model, by SDPA backend and BLAS library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gpu_rig as rig
import gpu_steps
import torch
from blas_algorithms import Algorithms
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels import tiles
from engine.kernels.tiles import Product
from engine.models import llama_cuda
from engine.models.llama_cuda import LlamaCuda

BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.1f} s] {text}", flush=True)


@contextlib.contextmanager
def library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def prefill_variants(model: LlamaCuda, tokens: int) -> None:
    pool = rig.device_pool(4096, rig.LLAMA_8B)
    inputs = rig.prefill_inputs(model, pool, [tokens])
    inputs.fresh = True
    run = functools.partial(model.prefill, inputs, pool)
    expected = None
    flops = gpu_steps.prefill_flops([tokens], 0, model)
    variants: list[tuple[str, list[SDPBackend] | None, str]] = [
        ("as it is", None, "cublas"),
        ("flash", [SDPBackend.FLASH_ATTENTION], "cublas"),
        ("cudnn", [SDPBackend.CUDNN_ATTENTION], "cublas"),
        ("cublaslt", None, "cublaslt"),
        ("cudnn, cublaslt", [SDPBackend.CUDNN_ATTENTION], "cublaslt"),
        ("as it is, again", None, "cublas"),
    ]
    for name, backends, blas in variants:
        try:
            with library(blas), sdpa_kernel(backends) if backends else contextlib.nullcontext():
                got = run().float()
                expected = got if expected is None else expected
                off = float((got - expected).norm() / expected.norm())
                seconds = rig.timed(rig.capture(run).replay, 15)
            rate = flops / seconds / 1e12
            say(f"prefill 1x{tokens}, {name}: {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s, off {off:.1e}")
        except Exception as error:  # noqa: BLE001 - a variant that does not run is a result
            say(f"prefill 1x{tokens}, {name}: {type(error).__name__} {str(error)[:100]}")


def products(model: LlamaCuda, rows: int) -> None:
    """Each product of the 32 layers by each library, alone."""
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    wide = torch.randn(rows, 14336, device="cuda").bfloat16()
    out = torch.zeros(rows, 4096, device="cuda").bfloat16()
    cases: dict[str, Callable[[Any], object]] = {
        "qkv": lambda layer: F.linear(x, layer.qkv),
        "output": lambda layer: F.linear(x, layer.output),
        "output, added": lambda layer: out.addmm_(x, layer.output.t(), beta=0.5),
        "gate_up": lambda layer: F.linear(x, layer.gate_up),
        "down": lambda layer: F.linear(wide, layer.down),
        "down, added": lambda layer: out.addmm_(wide, layer.down.t(), beta=0.5),
    }
    for name, product in cases.items():
        line = []
        for blas in ("cublas", "cublaslt"):
            with library(blas):

                def run(product: Any = product) -> None:
                    for layer in model.layers:
                        product(layer)

                each = rig.timed(rig.capture(run).replay, 8) / len(model.layers)
            layer = model.layers[0]
            weight = getattr(layer, name.split(",")[0])
            line.append(f"{blas} {each * 1e6:.1f} us, {2 * rows * weight.numel() / each / 1e12:.0f} TFLOP/s")
        say(f"product {name}, {rows} rows: " + "; ".join(line))


def decode_prefetch(model: LlamaCuda, bandwidth: float) -> None:
    """Batch 128 with and without the first weights of gate and up fetched ahead, in turns."""
    key = (Product.GATE_UP, 128)
    chosen = tiles.TILES[key]
    assert chosen is not None
    for ahead in (256, 0, 256, 0):
        tiles.TILES[key] = dataclasses.replace(chosen, ahead=ahead)
        say(f"gate_up at 128 rows, {ahead} ahead:")
        gpu_steps.decode_table(model, bandwidth, batches=(128,))
    tiles.TILES[key] = chosen


def best_algorithms(model: LlamaCuda, tokens: int) -> None:
    """A prefill whose products take the fastest of the algorithms that cuBLASLt offers, not its first."""
    algorithms = Algorithms()
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    wide = torch.randn(tokens, 14336, device="cuda").bfloat16()

    def time(run: Callable[[], None]) -> float:
        return rig.timed(rig.capture(run).replay, 5, 1)

    for name, source, added in (("qkv", x, False), ("output", x, True), ("gate_up", x, False), ("down", wide, True)):
        weights = [getattr(layer, name) for layer in model.layers]
        found = algorithms.tune(source, weights, added, time)
        first = next(each for each in found if each[2] == 0)
        shown = ", ".join(f"#{place} {each * 1e6:.1f} us ({waves:.2f} waves)" for each, waves, place in found[:3])
        say(f"{name}, {tokens} rows: of {len(found)}: {shown}; the first: {first[0] * 1e6:.1f} us")
    pool = rig.device_pool(4096, rig.LLAMA_8B)
    inputs = rig.prefill_inputs(model, pool, [tokens])
    inputs.fresh = True
    run = functools.partial(model.prefill, inputs, pool)
    expected = run().float()
    functional = types.SimpleNamespace(
        linear=algorithms.linear,
        embedding=F.embedding,
        scaled_dot_product_attention=F.scaled_dot_product_attention,
    )
    flops = gpu_steps.prefill_flops([tokens], 0, model)
    with mock.patch.multiple(llama_cuda, F=functional, _add_product=algorithms.add):
        off = float((run().float() - expected).norm() / expected.norm())
        for name, backends in (("", None), (", cudnn", [SDPBackend.CUDNN_ATTENTION])):
            with sdpa_kernel(backends) if backends else contextlib.nullcontext():
                seconds = rig.timed(rig.capture(run).replay, 15)
            rate = flops / seconds / 1e12
            say(f"prefill 1x{tokens}, best algorithms{name}: {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s, off {off:.1e}")


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = rig.read_bandwidth()
    torch.cuda.empty_cache()
    say(f"read bandwidth {bandwidth / 1e12:.3f} TB/s, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    model = LlamaCuda(rig.LLAMA_8B, rig.RandomWeights(), torch.bfloat16, torch.device("cuda"))
    say("model made")
    gpu_steps.decode_table(model, bandwidth, batches=(1, 32, 128))
    for tokens in (512, 1024):
        prefill_variants(model, tokens)
    products(model, 512)
    decode_prefetch(model, bandwidth)
    model.pdl = False  # kernels that overlap cannot be told apart
    gpu_steps.prefill_profile(model)
    model.pdl = True
    for tokens in (512, 1024):
        best_algorithms(model, tokens)


if __name__ == "__main__":
    main()
