"""All that the GPU path has to show, as one table. The model has the shape of an 8B one and random weights.

    python bench/gpu/engine_gpu.py OUT.json

Shares are of the memory floor: the bytes of weights and KV that a step must read, at 4.3 TB/s; the last column uses the
read bandwidth measured in the same call. transformers runs with the best attention that is installed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gpu_loop
import gpu_rig as rig
import gpu_steps
import torch

from engine.models.llama_cuda import LlamaCuda

DECODE_TARGETS = {1: 0.85, 32: 0.85, 128: 0.90}
PREFILL_TARGET = 600
LOOP_TARGET = 1.6
PEERS = ("flash_attention_3", "flash_attention_2", "sdpa")


def transformers_best() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for attention in PEERS:
        for settings in ({}, {"use_async_batching": True, "use_cuda_graph": True}):
            try:
                name = f"{attention} {settings or 'defaults'}"
                found[name] = gpu_loop.peer(attention, max_memory_percent=0.5, **settings)
            except Exception as error:  # noqa: BLE001 - a setting that does not run is reported
                print("transformers does not run with", attention, settings, type(error).__name__, str(error)[:200])
            torch.cuda.empty_cache()
        if found:
            break
    return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = rig.read_bandwidth()
    torch.cuda.empty_cache()
    model = LlamaCuda(rig.LLAMA_8B, rig.RandomWeights(), torch.bfloat16, torch.device("cuda"))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read TB/s": bandwidth / 1e12,
    }
    report["decode"] = gpu_steps.decode_table(model, bandwidth)
    report["decode, fp8 KV"] = gpu_steps.decode_table(model, bandwidth, torch.float8_e4m3fn)
    report["prefill"] = gpu_steps.prefill_table(model)
    report["loop"] = gpu_loop.ours(model)
    del model
    torch.cuda.empty_cache()
    for peers in (dict, transformers_best):  # they can take minutes: what is ours is kept first
        report["transformers"] = peers()
        with open(sys.argv[1], "w") as file:
            json.dump(report, file, indent=1)
        show(report)


def show(report: dict[str, Any]) -> None:
    print(f"\n{report['device']}, torch {report['torch']}, read bandwidth {report['read TB/s']:.2f} TB/s")
    line = "{:<34} {:>10} {:>14} {:>10} {:>12}".format
    print(line("what", "ms", "share of floor", "target", "of measured"))
    for name in ("decode", "decode, fp8 KV"):
        for row in report[name]:
            target = DECODE_TARGETS.get(row["batch"], "") if name == "decode" else ""
            print(
                line(
                    f"{name}, batch {row['batch']}, 2k",
                    f"{row['ms']:.3f}",
                    f"{row['of 4.3 TB/s']:.3f}",
                    target,
                    f"{row['of measured']:.3f}",
                )
            )
    print(line("what", "ms", "TFLOP/s", "target", ""))
    for row in report["prefill"]:
        target = PREFILL_TARGET if int(row["chunk"].split("x")[1].split("/")[0]) >= 512 else ""
        print(line(f"prefill {row['chunk']}", f"{row['ms']:.2f}", f"{row['TFLOP/s']:.0f}", target, ""))
    loop = report["loop"]
    print(line("whole loop, 32 x 512 + 128", "seconds", "tokens/s", "target", ""))
    print(line("ours", f"{loop['seconds']:.3f}", f"{loop['tokens/s']:.0f}", "", ""))
    for name, row in report["transformers"].items():
        print(line(f"transformers {name}"[:70], f"{row['seconds']:.3f}", f"{row['tokens/s']:.0f}", "", ""))
    if report["transformers"]:
        ratio = loop["tokens/s"] / max(row["tokens/s"] for row in report["transformers"].values())
        print(line("ratio", "", f"{ratio:.2f}", LOOP_TARGET, ""))
    print(
        f"loop step {loop['ms/step']:.3f} ms, its graph alone {loop['graph alone, ms/step']:.3f} ms; "
        f"host busy {loop['host ms/step, waits excluded']:.3f} ms a step"
    )


if __name__ == "__main__":
    main()
