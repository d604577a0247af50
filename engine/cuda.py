"""The engine on a CUDA device: its model, the size of its KV pool, and its runner."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable

import torch

from engine.checkpoint import Checkpoint
from engine.config import EngineConfig
from engine.cuda_runner import CudaRunner
from engine.kv_pool import KvPool, dtype_named
from engine.models.llama_cuda import LlamaCuda
from engine.models.llama_shape import DEFAULTS
from engine.runner import set_threads
from engine.weights import Weights
from kvstore.errors import SettingsError

log = logging.getLogger(__name__)


def compute_dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """ "auto": the checkpoint's, if it is one to compute in, else bfloat16."""
    name = config.dtype
    if name == "auto":
        of_checkpoint = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        name = of_checkpoint if of_checkpoint in ("bfloat16", "float16") else "bfloat16"
    try:
        return dtype_named(name)
    except ValueError as error:
        raise SettingsError([("dtype", str(error))]) from error


def kv_dtype(config: EngineConfig, compute: torch.dtype) -> torch.dtype:
    """fp8: e4m3 with scale 1. K and V of a model are far below its largest value, 448; beyond they are clamped."""
    if config.kv_cache_dtype == "auto":
        return compute
    if config.kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn
    raise SettingsError([("kv_cache_dtype", f"{config.kv_cache_dtype!r} is not supported; supported: auto, fp8")])


@dataclasses.dataclass(frozen=True, slots=True)
class CudaEngine:
    """`memory` holds the pool's blocks, [num_blocks * block_bytes] uint8 on the device."""

    runner: CudaRunner
    memory: torch.Tensor
    num_blocks: int
    block_bytes: int
    dtype: torch.dtype  # of K and V


def open_cuda(
    config: EngineConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None] = lambda stage, done: None
) -> CudaEngine:
    """Weights, KV pool and captured graphs on the current device. SettingsError for what has no CUDA path."""
    _refuse_what_has_no_path(config, checkpoint)
    device = torch.device("cuda", torch.cuda.current_device())
    set_threads(config)
    dtype = compute_dtype(config, checkpoint)
    shape = checkpoint.kv_shape
    of_kv = kv_dtype(config, dtype)
    sizes = (shape.num_layers, config.tokens_per_block, shape.num_kv_heads, shape.head_dim, of_kv)
    block_bytes = KvPool.bytes_per_block(*sizes)
    progress("weights", 0.0)
    with torch.inference_mode(), Weights(checkpoint, lambda done: progress("weights", done)) as weights:
        model = LlamaCuda(checkpoint.config, weights, dtype, device)
    progress("weights", 1.0)
    longest = min(config.max_seq_len or checkpoint.max_seq_len, checkpoint.max_seq_len)

    def runner_of(num_blocks: int) -> tuple[CudaRunner, torch.Tensor]:
        memory = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        pool = KvPool(memory, num_blocks, *sizes)
        batch = min(config.max_batch_size, config.max_num_tokens)
        runner = CudaRunner(model, pool, batch, config.max_num_tokens, longest)
        runner.runs_ahead = config.role != "context"
        runner.settles = config.role == "context" or config.pool is not None
        return runner, memory

    progress("cache", 0.0)
    num_blocks = _configured_blocks(config)
    if num_blocks is None:
        # Graphs hold the pool's address, so what they leave free is known only from a trial without a pool.
        trial = runner_of(1)
        free = _free_bytes(device)
        del trial
        gc.collect()
        torch.cuda.empty_cache()
        num_blocks = int(free * config.free_gpu_memory_fraction) // block_bytes
    if num_blocks < 1:
        raise SettingsError([("kv_cache_config", f"{num_blocks} KV blocks; a block has {block_bytes} bytes")])
    progress("warm-up", 0.0)
    runner, memory = runner_of(num_blocks)
    log.info("CUDA: %s, weights in %s, KV in %s", torch.cuda.get_device_name(device), dtype, of_kv)
    return CudaEngine(runner, memory, num_blocks, block_bytes, of_kv)


def memory_in_use() -> int:
    """Bytes of device memory that this process holds."""
    return torch.cuda.memory_reserved()


def _free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _configured_blocks(config: EngineConfig) -> int | None:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.max_tokens is not None:
        return -(-config.max_tokens // config.tokens_per_block)
    return None


def _refuse_what_has_no_path(config: EngineConfig, checkpoint: Checkpoint) -> None:
    problems = []
    names = checkpoint.config.get("architectures") or []
    if not any(name in DEFAULTS for name in names):
        problems.append(
            (
                "model.architectures",
                f"{names} has no CUDA path; supported: {', '.join(sorted(DEFAULTS))}, or device: cpu",
            )
        )
    if config.tp_size > 1:
        problems.append(("tp_size", f"{config.tp_size} is not supported on a GPU; supported: 1"))
    if config.weight_dtype != "auto":
        problems.append(("weight_dtype", f"{config.weight_dtype!r} is not supported on a GPU; supported: auto"))
    if config.host_cache_size:
        problems.append(("kv_cache_config.host_cache_size", "is not supported on a GPU; supported: 0"))
    if problems:
        raise SettingsError(problems)
