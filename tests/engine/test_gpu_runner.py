"""The CUDA runner gives the CPU's greedy answers, whatever is batched, cut, computed ahead or rounded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from cuda_rig import cuda_runner, serve  # noqa: E402 - Triton is there
from model_rig import TINY, Rig, load_rig  # noqa: E402 - Triton is there

from engine import sampler  # noqa: E402 - Triton is there
from engine.kv_pool import KvPool  # noqa: E402 - Triton is there
from engine.step import BadLogits, Chunk, SampleSpec  # noqa: E402 - Triton is there

QUESTIONS = [
    "What is the capital of France?",
    "Count from 3 to 14.",
    "Repeat: apple river stone house tree blue green wolf seven cloud paper glass",
    "The code of ada is 31. The code of bob is 77. The code of eve is 52. What is the code of bob?",
    "Repeat: " + " ".join(["stone", "moon", "tree", "fish"] * 10),
    "Count from 11 to 25.",
    "Repeat: glass wolf paper",
]


@pytest.fixture(scope="module")
def tiny() -> Rig:
    return load_rig(TINY)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(TINY, "tokenizer.json")))
    return [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in QUESTIONS]


@pytest.fixture(scope="module")
def plain(tiny: Rig, prompts: list[list[int]]) -> list[list[int]]:
    return [tiny.generate(prompt, 60) for prompt in prompts]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16, fp8 KV"])
def runner(request: Any) -> Any:
    dtype = torch.float32 if request.param == "float32" else torch.bfloat16
    return cuda_runner(TINY, dtype, torch.float8_e4m3fn if "fp8" in request.param else None)


@pytest.fixture
def expected(
    runner: Any, tiny: Rig, prompts: list[list[int]], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """The CPU's answers; with K and V rounded as the runner's pool rounds them."""
    if runner.pool.dtype != torch.float8_e4m3fn:
        return plain
    write = KvPool.write

    def rounding(pool: KvPool, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(pool, layer, slots, *(each.to(torch.float8_e4m3fn).to(each.dtype) for each in (keys, values)))

    monkeypatch.setattr(KvPool, "write", rounding)
    return [tiny.generate(prompt, 60) for prompt in prompts]


@pytest.mark.parametrize("at_once", [1, 3, 7])
@pytest.mark.parametrize("chunk", [1 << 30, 7])
def test_greedy_answers_of_the_cpu(
    runner: Any, tiny: Rig, prompts: list[list[int]], expected: list[list[int]], at_once: int, chunk: int
) -> None:
    eos = frozenset(tiny.checkpoint.eos_token_ids)
    assert serve(runner, prompts, 60, eos, chunk, at_once) == expected


def test_rounded_kv_keeps_nearly_all_answers(runner: Any, tiny: Rig, prompts: list[list[int]], plain: Any) -> None:
    answers = serve(runner, prompts, 60, frozenset(tiny.checkpoint.eos_token_ids))
    assert sum(a == b for a, b in zip(answers, plain, strict=True)) >= len(prompts) - 1


def test_steps_are_computed_ahead(runner: Any, tiny: Rig, prompts: list[list[int]]) -> None:
    before = runner.right_guesses
    serve(runner, prompts[:1], 20, frozenset(), at_once=1)
    assert runner.right_guesses - before == 19


def test_without_running_ahead(runner: Any, tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    runner.runs_ahead = False
    try:
        assert serve(runner, prompts, 60, frozenset(tiny.checkpoint.eos_token_ids)) == expected
    finally:
        runner.runs_ahead = True


def test_seeded_draws_do_not_depend_on_the_batch(runner: Any, prompts: list[list[int]]) -> None:
    specs = [
        SampleSpec(temperature=1.5, seed=5),
        SampleSpec(temperature=0.8, top_p=0.9, seed=6),
        SampleSpec(temperature=1.0, top_k=20, min_p=0.02, seed=7),
        SampleSpec(temperature=1.2, seed=8, logprobs=3),
        SampleSpec(temperature=0.0),
    ]
    together = serve(runner, prompts[:5], 30, frozenset(), at_once=5, specs=specs)
    alone = [serve(runner, [p], 30, frozenset(), specs=[s])[0] for p, s in zip(prompts[:5], specs, strict=True)]
    if runner.model.dtype == torch.float32:
        assert together == alone


def test_device_draws_equal_the_sampler_s(runner: Any, prompts: list[list[int]]) -> None:
    specs = [
        SampleSpec(temperature=t, top_p=p, top_k=k, min_p=m, seed=s)
        for s, (t, p, k, m) in enumerate(
            [(0.0, 1, 0, 0), (1.0, 1, 0, 0), (3.0, 0.7, 0, 0), (0.7, 1, 40, 0), (1.0, 1, 0, 0.1), (0.5, 0.5, 5, 0.01)]
        )
    ]
    logits = runner.run([Chunk(prompts[1], 0, [0, 1, 2], True)])[[0] * len(specs)]
    runner.fence().synchronize()
    on_host = logits.values.cpu()
    assert [each.token for each in runner.sample(logits, specs)] == [
        each.token for each in sampler.sample(on_host, specs)
    ]


def test_bad_logits_name_their_rows_and_spare_the_others(runner: Any, prompts: list[list[int]]) -> None:
    specs = [SampleSpec(temperature=0.0), SampleSpec(temperature=0.0)]
    logits = runner.run([Chunk(prompts[0], 0, [0, 1], True), Chunk(prompts[1], 0, [2, 3], True)])
    runner.fence().synchronize()
    broken = dataclasses.replace(logits, greedy=None)
    best = int(logits.values[1].argmax())
    with torch.inference_mode():
        broken.values[0, 3] = torch.nan
    torch.cuda.synchronize()
    with pytest.raises(BadLogits) as caught:
        runner.sample(broken, specs)
    assert caught.value.rows == [0]
    assert [each.token for each in runner.sample(broken[[1]], specs[:1])] == [best]


def test_rows_are_taken_behind_the_step_that_computes_them(runner: Any, prompts: list[list[int]]) -> None:
    chunks = [Chunk(prompts[0], 0, [0, 1], True), Chunk(prompts[1], 0, [2, 3], True)]
    greedy = [SampleSpec(temperature=0.0)] * 2
    expected = [each.token for each in runner.sample(runner.run(chunks), greedy)]
    with torch.cuda.stream(runner.stream):
        torch.cuda._sleep(100_000_000)  # clock cycles: the host is far ahead of the step
    swapped = runner.run(chunks)[[1, 0]]
    assert [each.token for each in runner.sample(swapped, greedy)] == expected[::-1]


def test_prompt_scores_need_all_rows(runner: Any, tiny: Rig, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    logits = runner.run([Chunk(prompt, 0, [0, 1], True, wants_all=True)])
    runner.fence().synchronize()
    assert logits.values.shape == (len(prompt), runner.vocab_size)
    on_cpu = tiny.runner().run([Chunk(prompt, 0, [0, 1], True, wants_all=True)])
    tolerance = 1e-3 if runner.model.dtype == torch.float32 else 0.2
    assert float((logits.values.cpu() - on_cpu).norm() / on_cpu.norm()) < tolerance
