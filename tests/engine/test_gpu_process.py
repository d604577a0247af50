"""A real engine process on the GPU: its answers, and the size of its pool."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.timeout(240)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from model_rig import TINY, load_rig  # noqa: E402 - Triton is there

from engine.client import EngineClient  # noqa: E402 - Triton is there
from engine.config import EngineConfig  # noqa: E402 - Triton is there
from engine.messages import SamplingParams, Submit  # noqa: E402 - Triton is there

QUESTIONS = [
    "What is the capital of France?",
    "Count from 3 to 14.",
    "Repeat: glass wolf paper",
    "Count from 11 to 25.",
]


async def answers(config: EngineConfig, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    client = await EngineClient.start(config)
    try:
        streams = [client.submit(Submit(f"r{index}", prompt, sampling)) for index, prompt in enumerate(prompts)]
        results = []
        for stream in streams:
            results.append([token async for output in stream for token in output.token_ids])
        assert client.ready.num_blocks > 0
        return results
    finally:
        await client.close()


@pytest.mark.parametrize("more", [{"num_blocks": 40}, {"free_gpu_memory_fraction": 0.01, "kv_cache_dtype": "fp8"}])
def test_greedy_answers_of_the_cpu(more: dict[str, Any]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(TINY, "tokenizer.json")))
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in QUESTIONS
    ]
    config = EngineConfig(
        model=TINY, device="cuda", dtype="bfloat16", max_batch_size=4, guided_decoding_backend="none", **more
    )
    got = asyncio.run(answers(config, prompts, SamplingParams(max_tokens=60, temperature=0.0)))
    rig = load_rig(TINY)
    assert got == [rig.generate(prompt, 60) for prompt in prompts]
