"""Offline throughput and latency of the engine on a CPU, beside other engines in the same run.

    python bench/engine.py MODEL [--engines ours,ours-int8,transformers,vllm] [--vllm_python PYTHON] [--threads 1]
        [--rounds 5] [--batch 1,16] [--input_len 62] [--output_len 48] [--first_token_len 256] [--json FILE]

Every engine lives in a process of its own for the whole run; rounds are interleaved, so that all see the same load of
the machine, and figures are medians over the rounds. Prompts are random tokens, new in each round; a greedy answer has
exactly --output_len tokens. `tok/s` is all generated tokens over the time from the first submission to the last
token, prefill included. CPU seconds count all processes of an engine: where the machine is shared, trust them more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]


class Engine:
    """An engine's process, spoken to by lines of JSON."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(HERE / "engine_peers.py"), name, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
        )
        self._read()

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended; run with BENCH_VERBOSE=1 to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def as_directory(model: str, folder: Path) -> str:
    """The model as a directory that every engine reads. A GGUF file is unpacked to float32 safetensors."""
    import torch
    from safetensors.torch import save_file

    from engine.checkpoint import open_checkpoint
    from engine.gguf_file import GgufFile, hf_tensor, hf_tensor_names

    checkpoint = open_checkpoint(model)
    if not checkpoint.is_gguf:
        return checkpoint.path
    file = GgufFile(checkpoint.path)
    tensors = {name: torch.from_numpy(hf_tensor(file, other)) for name, other in hf_tensor_names(file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": "float32"}))
    return str(folder)


def measure(engines: list[Engine], options: argparse.Namespace, vocab_size: int) -> dict[str, dict[str, list[Any]]]:
    """{engine: {case: [answer of each round]}}; the first, unmeasured round warms everything."""
    rng = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(100, vocab_size) for _ in range(length)] for _ in range(count)]

    found: dict[str, dict[str, list[Any]]] = {engine.name: {} for engine in engines}
    for round_number in range(options.rounds + 1):
        cases = {"first_token": (prompts(1, options.first_token_len), 1)}
        for batch in options.batch:
            cases[f"batch_{batch}"] = (prompts(batch, options.input_len), options.output_len)
        for case, (inputs, new) in cases.items():
            for engine in engines[round_number % len(engines) :] + engines[: round_number % len(engines)]:
                answer = engine.run(inputs, new)
                if round_number:
                    found[engine.name].setdefault(case, []).append(answer)
        print(f"round {round_number} of {options.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        if round_number:  # so that a run that is cut short has shown something
            print_table(summarise(found), agreement(found), sys.stderr)
    return found


def summarise(found: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, float]]:
    """Medians: milliseconds to the first token, tokens per second and per CPU second."""
    table: dict[str, dict[str, float]] = {}
    for engine, cases in found.items():
        row = table[engine] = {}
        for case, answers in cases.items():
            wall = statistics.median(answer["seconds"] for answer in answers)
            cpu = statistics.median(answer["cpu"] for answer in answers)
            if case == "first_token":
                row["first_token_ms"], row["first_token_cpu_ms"] = 1000 * wall, 1000 * cpu
            else:
                row[f"{case}_tok_s"], row[f"{case}_tok_cpu_s"] = answers[0]["tokens"] / wall, answers[0]["tokens"] / cpu
    return table


def agreement(found: dict[str, dict[str, list[Any]]]) -> dict[str, float]:
    """Share of measurements in which an engine gave the tokens of the first engine."""
    (_, reference), *_ = found.items()
    return {
        name: statistics.mean(
            answer["digest"] == other["digest"]
            for case, answers in cases.items()
            for answer, other in zip(answers, reference[case], strict=True)
        )
        for name, cases in found.items()
    }


def print_table(table: dict[str, dict[str, float]], same: dict[str, float], out: TextIO = sys.stdout) -> None:
    columns = list(next(iter(table.values())))
    lines = [f"{'engine':14}" + "".join(f"{column:>20}" for column in columns) + f"{'same tokens':>14}"]
    for engine, row in table.items():
        lines.append(f"{engine:14}" + "".join(f"{row[column]:20.1f}" for column in columns) + f"{same[engine]:14.0%}")
    print("\n".join(lines), file=out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory, a GGUF file, or a name that serve knows")
    parser.add_argument("--engines", default="ours,ours-int8")
    parser.add_argument("--vllm_python", default="", help="the interpreter that has vllm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16])
    parser.add_argument("--input_len", type=int, default=62)
    parser.add_argument("--output_len", type=int, default=48)
    parser.add_argument("--first_token_len", type=int, default=256)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    from engine.checkpoint import open_checkpoint

    vocab_size = open_checkpoint(options.model).vocab_size
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory() as folder:
        model = as_directory(options.model, Path(folder))
        try:
            for name in options.engines.split(","):
                python = options.vllm_python if name.startswith("vllm") else sys.executable
                engines.append(Engine(name, python or sys.executable, model, options.threads))
            found = measure(engines, options, vocab_size)
        finally:
            for engine in engines:
                engine.close()
    table, same = summarise(found), agreement(found)
    print_table(table, same)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "vllm_python")}
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
        report = {"settings": settings, "machine": machine, "summary": table, "same_tokens": same, "rounds": found}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
