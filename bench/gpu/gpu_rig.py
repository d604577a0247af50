"""An 8B-shaped model with random weights on the GPU, and how the GPU benchmarks time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from engine.kv_pool import KvPool
from engine.models.llama_cuda import DecodeState, LlamaCuda, PrefillInputs

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "model_type": "llama",
}
PAGE = 32


class RandomWeights:
    """Normal matrices and unit gains of any name, made on the device."""

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias") and "q_norm" not in name and "k_norm" not in name

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device="cuda", dtype=dtype)
        return torch.empty(shape, device="cuda", dtype=dtype).normal_(0, 0.02)


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads 8 GiB."""
    data = torch.randint(0, 255, (1 << 33,), dtype=torch.uint8, device="cuda").view(torch.int64)
    seconds = timed(data.max, 6)
    return data.nbytes / seconds


def timed(run: Callable[[], object], repeat: int = 20, warm: int = 3) -> float:
    """Median seconds of `run` by device events."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def device_pool(tokens: int, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> KvPool:
    """A pool of random K and V for `tokens` tokens."""
    shape = (config["num_hidden_layers"], PAGE, config["num_key_value_heads"], config["head_dim"], dtype)
    blocks = tokens // PAGE
    buffer = torch.empty(blocks * KvPool.bytes_per_block(*shape), dtype=torch.uint8, device="cuda")
    pool = KvPool(buffer, blocks, *shape)
    for at in range(0, blocks, 64):
        part = pool.blocks[at : at + 64]
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16).to(dtype))
    return pool


def decode_state(model: LlamaCuda, pool: KvPool, rows: int, context: int) -> DecodeState:
    """`rows` sequences of `context` tokens, the new one counted, in scattered blocks."""
    blocks = -(-context // PAGE)
    state = DecodeState(model, rows, blocks, pool.dtype, pool.blocks.shape[1])
    order = torch.randperm(pool.num_blocks, device="cuda")[: rows * blocks].view(rows, blocks)
    state.tables.copy_(order)
    state.lengths.fill_(context)
    state.ids.random_(0, model.vocab_size)
    return state


def prefill_inputs(model: LlamaCuda, pool: KvPool, counts: list[int], cached: int = 0) -> PrefillInputs:
    """Chunks of `counts` tokens after `cached` tokens each."""
    total = sum(counts)
    blocks = -(-(max(counts) + cached) // PAGE)
    order = torch.randperm(pool.num_blocks, device="cuda")[: len(counts) * blocks].view(len(counts), blocks).int()
    positions = torch.cat([torch.arange(cached, cached + count, device="cuda") for count in counts])
    rows = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), torch.tensor(counts, device="cuda"))
    return PrefillInputs(
        ids=torch.randint(0, model.vocab_size, (total,), device="cuda"),
        positions=positions.int(),
        slots=(order[rows, positions // PAGE] * PAGE + positions % PAGE).int(),
        starts=torch.tensor([0, *counts], device="cuda").cumsum(0).int(),
        lengths=torch.tensor([count + cached for count in counts], dtype=torch.int32, device="cuda"),
        tables=order,
    )
