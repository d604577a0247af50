"""Runs one step of the model over the pool: chunks in, logits out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from engine.attention import GATHER_BYTES, StepMeta, fresh_tails
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.kv_pool import KvPool, dtype_named
from engine.models.matrix import cpu_form
from engine.models.registry import Model, load_custom_modules, model_factory
from engine.parallel import Group
from engine.step import Chunk
from engine.weights import Weights
from kvstore.errors import SettingsError

Progress = Callable[[str, float], None]
"""Called with a stage of start-up ("weights") and the share of it that is done."""


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of weights, activations and KV. SettingsError if the name is unknown."""
    try:
        return dtype_named(config.dtype)
    except ValueError as error:
        raise SettingsError([("dtype", str(error))]) from error


def load_model(
    config: EngineConfig,
    progress: Progress = lambda stage, done: None,
    checkpoint: Checkpoint | None = None,
    group: Group | None = None,
) -> Model:
    """The model of `config`, weights in memory. Runs the custom modules first. SettingsError if it cannot be."""
    load_custom_modules(config.custom_module_dirs)
    if checkpoint is None:
        checkpoint = open_checkpoint(config.model, config.custom_module_dirs)
    factory = model_factory(checkpoint.config)
    set_threads(config)
    progress("weights", 0.0)
    form = cpu_form(config.weight_dtype)
    with torch.inference_mode(), Weights(checkpoint, lambda done: progress("weights", done), form, group) as weights:
        model = factory(checkpoint.config, weights, compute_dtype(config))
    progress("weights", 1.0)
    return model


def set_threads(config: EngineConfig) -> None:
    """Gives torch `cpu_threads` threads; 0 is every core that this process may use."""
    torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))


class Runner:
    """Owns the model and its place in the pool. Not thread-safe: one step at a time."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, pool: KvPool, model: Model | None = None) -> None:
        self.model = load_model(config, checkpoint=checkpoint) if model is None else model
        self.pool = pool
        self.vocab_size = self.model.vocab_size
        self._gather_slots = GATHER_BYTES // pool.token_bytes

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Computes the chunks' tokens into the pool. Logits [n, vocab_size] in float32 of those chunks that want
        them, in their order. A block must not be written by two chunks of one step."""
        if not chunks:
            return torch.empty(0, self.vocab_size)
        ids, meta = StepMeta.of(chunks, self.pool.page, self._gather_slots)
        self.pool.clear_tails(fresh_tails(chunks, self.pool.page))
        return self.model.forward(ids, meta, self.pool).float()
