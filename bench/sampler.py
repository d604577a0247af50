"""What the sampler costs a step on this machine: milliseconds for a batch, by what its requests ask for.

python bench/sampler.py --batch 16 --vocab 49152
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

# Instead of this folder, where another script is named as a package is.
sys.path[:1] = [str(Path(__file__).resolve().parent.parent)]

from engine.guided import words_of  # noqa: E402 - after the path is set
from engine.penalties import TokenCounts  # noqa: E402
from engine.sampler import sample  # noqa: E402
from engine.step import SampleSpec, Shaping  # noqa: E402

_REPEATS = 15
_HISTORY = 512  # tokens of prompt and answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49_152)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(arguments.batch, arguments.vocab, generator=generator) * 3
    made = _cases(arguments.vocab)
    result = {"batch": arguments.batch, "vocab": arguments.vocab, "ms": {}}
    for name, spec in made.items():
        specs = [spec(row) for row in range(arguments.batch)]
        result["ms"][name] = round(_milliseconds(lambda specs=specs: sample(logits, specs)), 3)
    print(json.dumps(result, indent=2))


def _cases(vocab: int) -> dict[str, Callable[[int], SampleSpec]]:
    random = np.random.default_rng(1)
    history = TokenCounts(random.integers(0, vocab, _HISTORY).tolist())
    penalties = Shaping(counts=history, repetition=1.1, presence=0.5, frequency=0.1)
    bias = Shaping(bias=(random.integers(0, vocab, 100), np.ones(100, np.float32)))
    mask = Shaping(mask=words_of(random.integers(0, vocab, vocab // 4).tolist(), vocab))
    return {
        "greedy": lambda row: SampleSpec(temperature=0),
        "temperature": lambda row: SampleSpec(seed=row),
        "top_p 0.9, top_k 50": lambda row: SampleSpec(seed=row, top_p=0.9, top_k=50),
        "min_p 0.05": lambda row: SampleSpec(seed=row, min_p=0.05),
        "greedy, logprobs 5": lambda row: SampleSpec(temperature=0, logprobs=5),
        "greedy, penalties": lambda row: SampleSpec(temperature=0, shaping=penalties),
        "greedy, bias 100": lambda row: SampleSpec(temperature=0, shaping=bias),
        "greedy, grammar": lambda row: SampleSpec(temperature=0, shaping=mask),
        "greedy, one row of penalties": lambda row: SampleSpec(temperature=0, shaping=None if row else penalties),
    }


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


if __name__ == "__main__":
    main()
