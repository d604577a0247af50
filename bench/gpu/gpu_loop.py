"""The whole engine loop on the GPU against transformers' continuous batching: 32 prompts of 512 tokens, 128 new each.

python bench/gpu/gpu_loop.py [--peer] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from typing import Any

import gpu_rig as rig
import torch

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.cuda_runner import CudaRunner
from engine.kv_pool import KvPool
from engine.loop import EngineLoop
from engine.messages import Output, SamplingParams, Shutdown, Submit
from engine.model_port import Model
from engine.models.llama_cuda import LlamaCuda
from engine.sampler_cuda import Draws
from engine.sequence import ModelFacts
from kvstore.transceivers.shm import SharedPool

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 512, 128


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rig.LLAMA_8B["vocab_size"], (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


class _Host:
    """Seconds in which the host only waited for tokens."""

    waited = 0.0
    original = Draws.wait

    @classmethod
    def install(cls) -> None:
        def wait(draws: Draws) -> tuple[list[int], list[int]]:
            began = time.perf_counter()
            result = cls.original(draws)
            cls.waited += time.perf_counter() - began
            return result

        Draws.wait = wait  # type: ignore[method-assign]


def ours(model: LlamaCuda, rounds: int = 3) -> dict[str, Any]:
    config = EngineConfig(model="8b", max_num_tokens=8192, max_batch_size=PROMPTS, enable_block_reuse=False)
    shape = (32, config.tokens_per_block, 8, 128, torch.bfloat16)
    num_blocks = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS) // config.tokens_per_block + 64
    buffer = torch.zeros(num_blocks * KvPool.bytes_per_block(*shape), dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    runner = CudaRunner(model, KvPool(buffer, num_blocks, *shape), PROMPTS, config.max_num_tokens, 2048)
    print(f"captured in {time.perf_counter() - began:.1f} s", flush=True)
    pages = SharedPool.create(num_blocks, 64, "bench")
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()

    def take(messages: list[Any]) -> None:
        now = time.perf_counter()
        for message in messages:
            if isinstance(message, Output):
                arrived.put((now, message))

    facts = ModelFacts("f" * 32, model.vocab_size, 2048, frozenset({2}))
    loop = EngineLoop(
        config,
        Model(facts, runner, runner.sample, runner.copy_block),
        BlockPool(num_blocks, False, pages.bump),
        pages,
        None,
        "bench",
        inbox,
        take,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    _Host.install()
    results = []
    for turn in range(rounds):
        _Host.waited = 0.0
        steps = loop.stats.steps
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        submits = [Submit(f"{turn}-{at}", ids, sampling) for at, ids in enumerate(prompts(turn))]
        began = time.perf_counter()
        for submit in submits:
            inbox.put(submit)
        tokens, first, last = 0, 0.0, began
        while tokens < PROMPTS * NEW_TOKENS:
            last, output = arrived.get(timeout=60)
            tokens += len(output.token_ids)
            if tokens <= PROMPTS:
                first = last
        steps = loop.stats.steps - steps
        total = last - began
        step = (last - first) / (NEW_TOKENS - 1)
        host = (total - _Host.waited) / max(1, steps)
        results.append(
            {
                "seconds": total,
                "tokens/s": tokens / total,
                "prefill s": first - began,
                "ms/step": step * 1e3,
                "host ms/step, waits excluded": host * 1e3,
                "steps": steps,
            }
        )
        print("ours", {key: round(value, 3) for key, value in results[-1].items()}, flush=True)
    inbox.put(Shutdown())
    thread.join()
    print(f"guessed rows {runner.guesses}, right {runner.right_guesses}", flush=True)
    state = rig.decode_state(model, runner.pool, PROMPTS, 576)
    graph = rig.capture(lambda: model.decode(state, PROMPTS, runner.pool))
    best = max(results[1:], key=lambda each: each["tokens/s"])
    best["graph alone, ms/step"] = rig.timed(graph.replay) * 1e3
    print(f"graph alone at 576 tokens: {best['graph alone, ms/step']:.3f} ms", flush=True)
    loop.close()
    pages.close()
    return best


def peer(attention: str, rounds: int = 2, **settings: Any) -> dict[str, Any]:
    """transformers' continuous batching with a persistent manager, warmed up."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = LlamaConfig(
        **{
            key: value
            for key, value in rig.LLAMA_8B.items()
            if key not in ("architectures", "model_type", "rope_theta")
        }
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(**settings)
    results = []
    for turn in range(rounds):
        inputs = prompts(10 + turn)
        began = time.perf_counter()
        outputs = model.generate_batch(inputs, generation, continuous_batching_config=batching, persistent_manager=True)
        total = time.perf_counter() - began
        tokens = sum(len(each.generated_tokens) for each in outputs.values())
        results.append({"seconds": total, "tokens/s": tokens / total, "tokens": tokens})
        print("transformers", attention, settings, {k: round(v, 3) for k, v in results[-1].items()}, flush=True)
    model.destroy_cached_continuous_batching_manager()
    return max(results[1:], key=lambda each: each["tokens/s"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", nargs="*", default=[], help="attention implementations of transformers to run too")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    report: dict[str, Any] = {}
    model = LlamaCuda(rig.LLAMA_8B, rig.RandomWeights(), torch.bfloat16, torch.device("cuda"))
    report["ours"] = ours(model)
    del model
    torch.cuda.empty_cache()
    for attention in arguments.peer:
        for settings in (
            {"max_memory_percent": 0.5},
            {"max_memory_percent": 0.5, "use_async_batching": True, "use_cuda_graph": True},
        ):
            try:
                report[f"{attention} {settings}"] = peer(attention, **settings)
            except Exception as error:  # noqa: BLE001 - a setting that does not run is reported
                print("FAILED", attention, settings, type(error).__name__, str(error)[:300], flush=True)
            torch.cuda.empty_cache()
        if any(key.startswith(attention) for key in report):
            break  # the others are slower
    best = max((value["tokens/s"] for key, value in report.items() if key != "ours"), default=None)
    if best:
        print(
            f"loop: {report['ours']['tokens/s']:.0f} tokens/s, {report['ours']['tokens/s'] / best:.2f} x transformers' best ({best:.0f})"  # noqa: E501 - one line of a table
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
