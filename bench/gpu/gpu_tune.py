"""Measures the candidates for engine/kernels/tiles.py on this GPU.

    python bench/gpu/gpu_tune.py OUT.json [ROWS ...]

Each product of an 8B-shaped layer, for each count of rows, as one CUDA graph of launches over several copies of the
weights (so that none is found in the cache), chained as a decode step chains them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import torch

from engine.kernels.elementwise import rms_norm, silu_mul
from engine.kernels.linear import SplitScratch, Tile, linear
from engine.kernels.tiles import ROWS, Product

SHAPES = {
    Product.QKV: (6144, 4096),
    Product.OUTPUT: (4096, 4096),
    Product.GATE_UP: (14336, 4096),
    Product.DOWN: (4096, 14336),
    Product.HEAD: (128256, 4096),
}
SHARED_MEMORY = 220 * 1024


def candidates(product: Product, rows: int) -> list[Tile]:
    adds = product in (Product.OUTPUT, Product.DOWN)
    pair = 2 if product is Product.GATE_UP else 1
    if rows == 1:
        return [
            Tile(n, k, 1, warps, stages, ahead)
            for n, k, warps in ((4, 512, 4), (8, 512, 8), (16, 512, 8), (4, 1024, 8), (8, 512, 4))
            for stages in (1, 2, 4)
            for ahead in (512, 1024)
            if n * k <= 8192 // pair and not (product is Product.HEAD and n < 8)
        ]
    found = []
    for n in (64, 128):
        for k in (64, 128, 256):
            for split in (1, 2, 4) if adds else (1,):
                for stages in (3, 4, 6):
                    for warps in (4, 8):
                        for ahead in (0, 256, 1024):
                            tile = Tile(n, k, split, warps, stages, ahead)
                            if adds and _sensible(tile, product, rows, pair):
                                found.append(tile)
                            if not adds and _sensible(tile, product, rows, pair):
                                found.append(dataclasses.replace(tile, norms=False))
    return found


def _sensible(tile: Tile, product: Product, rows: int, pair: int) -> bool:
    n, k = SHAPES[product]
    programs = n // tile.block_n * tile.split
    memory = (tile.block_n * pair + rows) * tile.block_k * 2 * tile.stages
    return (
        programs >= 90
        and (tile.split == 1 or programs <= 600)
        and 48 * 1024 <= memory <= SHARED_MEMORY
        and k % (tile.block_k * tile.split) == 0
        and (tile.warps == 8) == (tile.block_n * pair * rows >= 8192)
        and tile.block_n >= 64
        and (tile.stages != 6 or tile.block_k <= 128)
    )


class Case:
    def __init__(self, product: Product, rows: int, copies: int) -> None:
        n, k = SHAPES[product]
        self.product, self.rows = product, rows
        self.silu, self.add = product is Product.GATE_UP, product in (Product.OUTPUT, Product.DOWN)
        self.normed = not self.add
        out_dtype = torch.float32 if product is Product.HEAD else torch.bfloat16
        wide = 2 * n if self.silu else n
        self.weights = [
            torch.empty(wide, k, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(copies)
        ]
        self.x = torch.randn(rows, k, device="cuda").bfloat16()
        self.gain = torch.rand(k, device="cuda").bfloat16() + 0.5
        self.out = torch.zeros(rows, n, dtype=out_dtype, device="cuda")
        self.scratch = SplitScratch(self.x.device)
        self.bytes = wide * k * 2
        self.norm_out, self.both = torch.empty_like(self.x), torch.empty(rows, wide, device="cuda").bfloat16()

    def ours(self, weight: torch.Tensor, tile: Tile, pdl: bool = True) -> None:
        norm, x = self.gain if self.normed else None, self.x
        if norm is not None and not tile.norms:
            x, norm = rms_norm(x, norm, 1e-5, self.norm_out, pdl=pdl), None
        linear(
            x, weight, self.out, tile, norm=norm, eps=1e-5, add=self.add, silu=self.silu, scratch=self.scratch, pdl=pdl
        )

    def cublas(self, weight: torch.Tensor) -> None:
        x = rms_norm(self.x, self.gain, 1e-5, self.norm_out, pdl=True) if self.normed else self.x
        if self.add:
            self.out.addmm_(x, weight.t())
        elif self.silu:
            silu_mul(torch.mm(x, weight.t(), out=self.both), self.out, pdl=True)
        elif self.out.dtype == torch.float32:
            self.out.copy_(x @ weight.t())
        else:
            torch.mm(x, weight.t(), out=self.out)

    def wrong(self, tile: Tile) -> float:
        self.out.zero_()
        self.ours(self.weights[0], tile)
        got = self.out.clone()
        self.out.zero_()
        self.cublas(self.weights[0])
        return float((got.float() - self.out.float()).norm() / self.out.float().norm())

    def seconds(self, launch: Callable[[torch.Tensor], None]) -> float:
        """A launch, in a graph of many."""
        for weight in self.weights[:2]:
            launch(weight)
        graph = torch.cuda.CUDAGraph()
        repeat = max(1, 16 // len(self.weights))
        with torch.cuda.graph(graph):
            for _ in range(repeat):
                for weight in self.weights:
                    launch(weight)
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeat / len(self.weights))
        return statistics.median(times[1:])


def _compile(job: tuple[str, int, list[tuple[int, ...]]]) -> None:
    name, rows, tiles = job
    case = Case(Product(name), rows, 1)
    for tile in tiles:
        try:
            case.ours(case.weights[0], Tile(*tile))
        except Exception as error:  # noqa: BLE001 - an unusable candidate is reported by the measuring process
            print(name, rows, tile, str(error)[:80], flush=True)


def tune(products: list[Product], counts: list[int], processes: int) -> dict[str, dict[str, object]]:
    began = time.monotonic()
    jobs = []
    for product in products:
        for rows in counts:
            tiles = [
                (t.block_n, t.block_k, t.split, t.warps, t.stages, t.ahead, t.norms) for t in candidates(product, rows)
            ]
            jobs += [(product.value, rows, tiles[at : at + 6]) for at in range(0, len(tiles), 6)]
    print("candidates", sum(len(job[2]) for job in jobs), flush=True)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, jobs, chunksize=1)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    table: dict[str, dict[str, object]] = {}
    for product in products:
        for rows in counts:
            case = Case(product, rows, max(2, min(16, int(600e6 / (SHAPES[product][0] * SHAPES[product][1] * 2)))))
            base = case.seconds(case.cublas)
            results = []
            for tile in candidates(product, rows):
                try:
                    if not case.wrong(tile) < 0.02:
                        print("WRONG", product.value, rows, tile, case.wrong(tile), flush=True)
                        continue
                    results.append((case.seconds(functools.partial(case.ours, tile=tile)), tile))
                except Exception as error:  # noqa: BLE001 - an unusable candidate is a result
                    print("FAILED", product.value, rows, tile, str(error)[:80], flush=True)
            results.sort(key=lambda each: each[0])
            best, tile = results[0]
            line = [product.value, rows, f"cublas {base * 1e6:.1f} us {case.bytes / base / 1e12:.2f} TB/s"]
            for seconds, each in results[:3]:
                line.append(
                    f"{seconds * 1e6:.1f} us {case.bytes / seconds / 1e12:.2f} {each.block_n},{each.block_k},{each.split},{each.warps},{each.stages},{each.ahead},{int(each.norms)}"  # noqa: E501 - one line of a table
                )
            print(*line, sep=" | ", flush=True)
            table[f"{product.value}/{rows}"] = {
                "cublas_us": base * 1e6,
                "best_us": best * 1e6,
                "bytes": case.bytes,
                "tile": [tile.block_n, tile.block_k, tile.split, tile.warps, tile.stages, tile.ahead, tile.norms],
                "all": [
                    (round(s * 1e6, 2), t.block_n, t.block_k, t.split, t.warps, t.stages, t.ahead, t.norms)
                    for s, t in results
                ],
            }
            torch.cuda.empty_cache()
    print(f"tuned in {time.monotonic() - began:.0f} s", flush=True)
    return table


if __name__ == "__main__":
    rows = [int(each) for each in sys.argv[2:]] or list(ROWS)
    with open(sys.argv[1], "w") as file:
        json.dump(tune(list(Product), rows, 14), file)
