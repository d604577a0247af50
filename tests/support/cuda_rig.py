"""A small driver of the CUDA runner: sequences that join, end and give their blocks back, as under a scheduler."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import torch

from engine.checkpoint import open_checkpoint
from engine.cuda_runner import CudaRunner
from engine.kv_pool import KvPool
from engine.models.llama_cuda import LlamaCuda
from engine.step import Chunk, Sampled, SampleSpec
from engine.weights import Weights

PAGE = 32


def cuda_runner(
    path: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, num_blocks: int = 24, max_batch: int = 8
) -> CudaRunner:
    """A runner of the model at `path` over a pool filled with NaN."""
    checkpoint = open_checkpoint(path, ())
    device = torch.device("cuda")
    with torch.inference_mode(), Weights(checkpoint) as weights:
        model = LlamaCuda(checkpoint.config, weights, dtype, device)
    shape = checkpoint.kv_shape
    sizes = (shape.num_layers, PAGE, shape.num_kv_heads, shape.head_dim, kv_dtype or dtype)
    buffer = torch.full((num_blocks * KvPool.bytes_per_block(*sizes),), 255, dtype=torch.uint8, device=device)
    return CudaRunner(model, KvPool(buffer, num_blocks, *sizes), max_batch, 1024, checkpoint.max_seq_len)


@dataclasses.dataclass
class Sequence_:
    prompt: list[int]
    spec: SampleSpec
    limit: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    table: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    sampled: list[Sampled] = dataclasses.field(default_factory=list)

    def known(self) -> list[int]:
        return self.prompt + self.tokens


def serve(
    runner: CudaRunner,
    prompts: Sequence[Sequence[int]],
    count: int,
    eos: frozenset[int],
    chunk: int = 1 << 30,
    at_once: int = 4,
    specs: Sequence[SampleSpec] | None = None,
) -> list[list[int]]:
    """Answers of up to `count` tokens; `at_once` sequences run together, the next joins when one ends."""
    specs = specs or [SampleSpec(temperature=0.0)] * len(prompts)
    waiting = deque(Sequence_(list(p), s, count) for p, s in zip(prompts, specs, strict=True))
    everything = list(waiting)
    free = list(range(runner.pool.num_blocks))
    running: list[Sequence_] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.popleft())
        chunks = []
        for each in running:
            known = each.known()
            end = min(len(known), each.computed + chunk)
            while len(each.table) * PAGE < end:
                each.table.append(free.pop(0))
            chunks.append(Chunk(known[each.computed : end], each.computed, each.table, end == len(known)))
            each.computed = end
        logits = runner.run(chunks)
        drawing = [each for each, part in zip(running, chunks, strict=True) if part.wants_logits]
        asked = [dataclasses.replace(each.spec, position=len(each.tokens)) for each in drawing]
        for each, sampled in zip(drawing, runner.sample(logits, asked), strict=True):
            each.tokens.append(sampled.token)
            each.sampled.append(sampled)
            if sampled.token in eos or len(each.tokens) == each.limit:
                running.remove(each)
                free = each.table + free  # the next sequence gets these blocks at once
                each.table = []
    return [each.tokens for each in everything]
