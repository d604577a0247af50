"""Runs one step of the model over the pool: chunks in, logits out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

from engine.attention import GATHER_BYTES, StepMeta, fresh_tails
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.kv_pool import KvPool, dtype_named
from engine.models.matrix import MatrixForm, bfloat16_is_fast, cpu_form
from engine.models.registry import Model, load_custom_modules, model_factory
from engine.parallel import Alone, Group
from engine.ranks import Ranks
from engine.step import Chunk
from engine.weights import Weights
from kvstore.errors import SettingsError

log = logging.getLogger(__name__)

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
    form = _form(config)
    with torch.inference_mode(), Weights(checkpoint, lambda done: progress("weights", done), form, group) as weights:
        model = factory(checkpoint.config, weights, compute_dtype(config))
    progress("weights", 1.0)
    return model


def _form(config: EngineConfig) -> MatrixForm:
    if config.weight_dtype not in ("auto", "int8"):
        raise SettingsError([("weight_dtype", f"{config.weight_dtype!r} is not supported; supported: auto, int8")])
    dtype = compute_dtype(config)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not bfloat16_is_fast()):
        log.warning("dtype %s: this CPU computes it in software; float32 is faster", config.dtype)
    return cpu_form(config.weight_dtype, dtype)


def weights_identity(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """A name of everything about the weights that changes the KV computed with them."""
    digest = checkpoint.weights_digest()
    return digest if config.weight_dtype == "auto" else f"{digest}:{config.weight_dtype}"


def set_threads(config: EngineConfig) -> None:
    """Gives torch `cpu_threads` threads; 0 is this rank's share of the cores that the process may use."""
    share = len(os.sched_getaffinity(0)) // config.tp_size
    torch.set_num_threads(config.cpu_threads or max(1, share))


class Runner:
    """Owns the model and its place in the pool. Not thread-safe: one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        pool: KvPool,
        model: Model | None = None,
        group: Group | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`group`: the ranks that this one computes with. `ranks`: those that rank 0 tells what to compute."""
        self.model = load_model(config, checkpoint=checkpoint, group=group) if model is None else model
        self.pool = pool
        self.vocab_size = self.model.vocab_size
        self._gather_slots = GATHER_BYTES // pool.token_bytes
        self._group: Group = group or Alone()
        self._ranks = ranks

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Computes the chunks' tokens into the pool. Logits [n, vocab_size] in float32 of those chunks that want
        them, in their order. A block must not be written by two chunks of one step."""
        if not chunks:
            return torch.empty(0, self.vocab_size)
        ids, meta = StepMeta.of(chunks, self.pool.page, self._gather_slots)
        self.pool.clear_tails(fresh_tails(chunks, self.pool.page))
        if self._ranks is not None:
            self._ranks.step(chunks)
        return self._forward(ids, meta)

    @torch.inference_mode()
    def compute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """This rank's share of what rank 0 runs."""
        return self._forward(*StepMeta.of(chunks, self.pool.page, self._gather_slots))

    def _forward(self, ids: torch.Tensor, meta: StepMeta) -> torch.Tensor:
        logits = self.model.forward(ids, meta, self.pool).float()
        if not len(meta.wanted):
            self._group.wait()  # nothing was exchanged after the last layer's keys and values were stored
        return logits
