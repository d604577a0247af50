"""Decode steps against the memory floor, and prefill against the matrix rate, of an 8B-shaped model.

python bench/gpu/gpu_steps.py [--variants] [--json OUT]
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import gpu_rig as rig
import torch

from engine.kernels import tiles
from engine.kernels.decode_attention import Cut, decode_attention
from engine.kernels.prefill_attention import prefill_attention
from engine.models.llama_cuda import LlamaCuda

CONTEXT = 2048


def weight_bytes(model: LlamaCuda) -> int:
    """What a decode step reads: all but the embedding table."""
    layers = sum(
        value.nbytes for layer in model.layers for value in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    return layers + model.head.nbytes


def decode_table(
    model: LlamaCuda,
    bandwidth: float,
    dtype: torch.dtype = torch.bfloat16,
    batches: tuple[int, ...] = (1, 8, 32, 64, 128),
) -> list[dict[str, Any]]:
    """A row for each batch size: milliseconds of a step under a CUDA graph, and its share of the floor."""
    pool = rig.device_pool(128 * CONTEXT, rig.LLAMA_8B, dtype)
    rows = []
    for batch in batches:
        state = rig.decode_state(model, pool, batch, CONTEXT)
        graph = rig.capture(functools.partial(model.decode, state, batch, pool))
        seconds = rig.timed(graph.replay, 30)
        needed = weight_bytes(model) + batch * (CONTEXT - 1) * pool.token_bytes * 2 * len(model.layers)
        rows.append(
            {
                "batch": batch,
                "kv": str(dtype),
                "ms": seconds * 1e3,
                "bytes": needed,
                "of 4.3 TB/s": needed / 4.3e12 / seconds,
                "of measured": needed / bandwidth / seconds,
            }
        )
        print(
            f"decode kv={dtype} batch {batch}: {seconds * 1e3:.3f} ms, {needed / 4.3e12 / seconds:.3f} of 4.3 TB/s, {needed / bandwidth / seconds:.3f} of measured",  # noqa: E501 - one line of a table
            flush=True,
        )
        del graph, state
    torch.cuda.empty_cache()
    return rows


def prefill_flops(counts: list[int], cached: int, model: LlamaCuda) -> float:
    """Products of the layers for each token, and attention's over what each token sees."""
    shape = model.shape
    matrices = sum(
        value.numel() for layer in model.layers for value in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    seen = sum(count * cached + count * (count + 1) / 2 for count in counts)
    return 2.0 * matrices * sum(counts) + 4.0 * seen * shape.heads * shape.head_dim * shape.layers


def prefill_table(model: LlamaCuda) -> list[dict[str, Any]]:
    pool = rig.device_pool(48 * 1024, rig.LLAMA_8B)
    rows = []
    for counts, cached in (
        ([128], 0),
        ([256], 0),
        ([512], 0),
        ([1024], 0),
        ([2048], 0),
        ([2048] * 4, 0),
        ([512], 7680),
    ):
        inputs = rig.prefill_inputs(model, pool, counts, cached)
        inputs.fresh = len(counts) == 1 and not cached
        run: Any = functools.partial(model.prefill, inputs, pool)
        if sum(counts) <= 1024:
            run = rig.capture(run).replay
        seconds = rig.timed(run, 10)
        rate = prefill_flops(counts, cached, model) / seconds / 1e12
        name = f"{len(counts)}x{counts[0]}/{cached}"
        rows.append({"chunk": name, "ms": seconds * 1e3, "TFLOP/s": rate})
        print(f"prefill {name}: {seconds * 1e3:.2f} ms, {rate:.0f} TFLOP/s", flush=True)
    del pool
    torch.cuda.empty_cache()
    return rows


def attention_variants(model: LlamaCuda) -> None:
    """Prefill attention alone, for several ways to cut it up."""
    pool = rig.device_pool(48 * 1024, rig.LLAMA_8B)
    for counts, cached in (([512], 0), ([1024], 0), ([2048] * 4, 0), ([512], 7680)):
        inputs = rig.prefill_inputs(model, pool, counts, cached)
        query = torch.randn(sum(counts), 4096, device="cuda").bfloat16()
        out = torch.empty_like(query)
        seen = sum(count * cached + count * (count + 1) / 2 for count in counts)
        line = [f"attention {len(counts)}x{counts[0]}/{cached}"]
        for block_m, block_n, warps, stages in (
            (128, 64, 8, 3),
            (128, 64, 8, 2),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
            (128, 32, 8, 4),
            (64, 64, 4, 3),
            (64, 64, 4, 2),
            (64, 128, 4, 2),
        ):
            run = functools.partial(
                prefill_attention,
                query,
                pool.keys[3],
                pool.values[3],
                inputs.tables,
                inputs.starts,
                inputs.lengths,
                model.heads,
                out,
                block_m=block_m,
                block_n=block_n,
                warps=warps,
                stages=stages,
            )
            try:
                seconds = rig.timed(rig.capture(run).replay, 10)
                line.append(f"{block_m},{block_n},{warps},{stages}: {4 * seen * 4096 / seconds / 1e12:.0f}")
            except Exception as error:  # noqa: BLE001 - a variant that does not fit is a result
                line.append(f"{block_m},{block_n}: {type(error).__name__}")
        print(" | ".join(line), flush=True)


def cut_variants(model: LlamaCuda) -> None:
    """The decode attention of 32 layers, for several ways to cut it up."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pool = rig.device_pool(128 * CONTEXT, rig.LLAMA_8B, dtype)
        for batch, splits in ((1, (8, 16, 32)), (32, (1, 2, 4)), (128, (1, 2))):
            state = rig.decode_state(model, pool, batch, CONTEXT)
            state.qkv.normal_()
            results = []
            for split in splits:
                for block_n, warps, stages in (
                    (64, 4, 3),
                    (64, 4, 2),
                    (32, 4, 3),
                    (32, 2, 3),
                    (64, 8, 3),
                    (128, 4, 2),
                    (128, 8, 2),
                    (32, 1, 3),
                    (64, 2, 2),
                ):
                    cut = Cut(split, block_n, warps, stages)

                    def run(cut: Cut = cut, state: Any = state, pool: Any = pool) -> None:
                        for layer in range(32):
                            decode_attention(
                                state.qkv,
                                pool.keys[layer],
                                pool.values[layer],
                                state.tables,
                                state.lengths,
                                state.staged[:, layer],
                                state.attended,
                                model.heads,
                                state.attention,
                                cut=cut,
                                pdl=True,
                            )

                    try:
                        results.append((rig.timed(rig.capture(run).replay, 8) * 1e3, cut))
                    except Exception as error:  # noqa: BLE001 - a variant that does not fit is a result
                        print("FAILED", cut, str(error)[:60])
            results.sort(key=lambda each: each[0])
            text = " | ".join(
                f"{ms:.3f}: {c.splits},{c.block_n},{c.warps},{c.stages}" for ms, c in results[:5] + results[-1:]
            )
            print(f"decode attention x32 {dtype} batch {batch}: {text}", flush=True)


def profile(model: LlamaCuda, batch: int) -> None:
    pool = rig.device_pool(batch * CONTEXT, rig.LLAMA_8B)
    state = rig.decode_state(model, pool, batch, CONTEXT)
    graph = rig.capture(lambda: model.decode(state, batch, pool))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda each: -each.device_time_total)[:8]
    print(
        f"profile, batch {batch}:",
        "; ".join(f"{a.key[:40]} x{a.count} {a.device_time_total / 1e3:.3f} ms" for a in averages),
        flush=True,
    )


def prefill_profile(model: LlamaCuda) -> None:
    pool = rig.device_pool(4096, rig.LLAMA_8B)
    fresh_inputs = rig.prefill_inputs(model, pool, [512])
    fresh_inputs.fresh = True
    graph = rig.capture(functools.partial(model.prefill, fresh_inputs, pool))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda each: -each.device_time_total)[:12]
    print(
        "profile, prefill 512:",
        "; ".join(f"{a.key[:40]} x{a.count} {a.device_time_total / 1e3:.3f} ms" for a in averages),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only-decode", action="store_true")
    parser.add_argument("--tiles", help="a table made by gpu_tune.py")
    arguments = parser.parse_args()
    if arguments.tiles:
        with open(arguments.tiles) as file:
            for key, value in json.load(file).items():
                product, rows = key.split("/")
                use = value["best_us"] < value["cublas_us"]
                tiles.TILES[tiles.Product(product), int(rows)] = tiles.Tile(*value["tile"]) if use else None
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = rig.read_bandwidth()
    torch.cuda.empty_cache()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    model = LlamaCuda(rig.LLAMA_8B, rig.RandomWeights(), torch.bfloat16, torch.device("cuda"))
    report: dict[str, Any] = {"bandwidth": bandwidth, "decode": decode_table(model, bandwidth)}
    if not arguments.only_decode:
        report["prefill"] = prefill_table(model)
    if arguments.variants:
        cut_variants(model)
        attention_variants(model)
        model.pdl = False  # kernels that overlap cannot be told apart
        for batch in (1, 32, 128):
            profile(model, batch)
        prefill_profile(model)
        model.pdl = True
    if not arguments.only_decode:
        report["decode fp8"] = decode_table(model, bandwidth, torch.float8_e4m3fn)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
