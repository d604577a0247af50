"""One engine under measurement, in a process of its own: `python bench/engine_peers.py NAME MODEL THREADS`.

NAME is ours, ours-int8, ours-bf16, transformers, vllm or vllm-bf16, run by whichever Python has it. A line of JSON
{"prompts": [[ids]], "new": n} on standard input is answered by one with the wall and the CPU seconds (of this process
and all below it) that greedy generation of exactly n tokens for every prompt took, and a digest of the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]: ...

    def close(self) -> None: ...


class Ours:
    """The engine process behind its client, as a worker's HTTP server drives it; no block reuse."""

    def __init__(self, model: str, threads: int, **options: Any) -> None:
        sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
        from engine.client import EngineClient
        from engine.config import EngineConfig

        config = EngineConfig(
            model=model, cpu_threads=threads, max_num_tokens=2048, enable_block_reuse=False, transfers=(), **options
        )
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(EngineClient.start(config))
        self._count = 0

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return self._loop.run_until_complete(self._generate(prompts, new))

    async def _generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        from engine.messages import SamplingParams, Submit

        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        streams = []
        for prompt in prompts:
            self._count += 1
            streams.append(self._client.submit(Submit(f"r{self._count}", prompt, sampling)))
        return [[token async for output in stream for token in output.token_ids] for stream in streams]

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


class Transformers:
    """`generate` on one padded batch. All prompts of a call have one length here, so nothing is padded."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        return [row[len(prompts[0]) :] for row in out.tolist()]

    def close(self) -> None:
        pass


class Vllm:
    """vllm's offline LLM class; no prefix caching, eager, as on a CPU it is run."""

    def __init__(self, model: str, threads: int, dtype: str = "float32") -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        import vllm

        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=2048,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=2048,
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        sampling = self._sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(inputs, sampling, use_tqdm=False)]

    def close(self) -> None:
        del self._llm


def make(name: str, model: str, threads: int) -> Peer:
    match name:
        case "ours":
            return Ours(model, threads)
        case "ours-int8":
            return Ours(model, threads, weight_dtype="int8")
        case "ours-bf16":
            return Ours(model, threads, dtype="bfloat16")
        case "transformers":
            return Transformers(model, threads)
        case "vllm":
            return Vllm(model, threads)
        case "vllm-bf16":
            return Vllm(model, threads, "bfloat16")
    raise SystemExit(f"unknown engine {name!r}")


def cpu_seconds() -> float:
    """Of this process and the live ones below it."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    name, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.basicConfig(level="WARNING")
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error instead
    os.dup2(2, 1)
    peer = make(name, model, threads)
    answers.write(json.dumps({"ready": name}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        cpu, began = cpu_seconds(), time.perf_counter()
        tokens = peer.generate(task["prompts"], task["new"])
        seconds, used = time.perf_counter() - began, cpu_seconds() - cpu
        digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
        count = sum(map(len, tokens))
        answers.write(json.dumps({"seconds": seconds, "cpu": used, "tokens": count, "digest": digest}) + "\n")
    peer.close()


if __name__ == "__main__":
    main()
