"""Any other full-attention decoder: transformers' own model over the paged pool.

The model runs packed rows [1, T] without transformers' cache; each of its attention modules stores and reads K and V
through `paged_attention` instead. What such a model may do that the pool cannot hold is refused: from its configuration
(see fallback.py), and by comparing a short run over a pool with the model's own attention when it is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from engine.attention import StepMeta, fresh_tails, paged_attention
from engine.kv_pool import KvPool
from engine.models.matrix import Matrix, MatrixForm, multiply, plain
from engine.step import Chunk
from engine.weights import Weights
from kvstore.errors import SettingsError

_ATTENTION = "paged_kv"
_IGNORED = ("softcap", "s_aux", "sliding_window", "position_bias", "alibi")
"""What some models hand to their attention beside q, k and v, and this attention has no place for."""


@dataclasses.dataclass(slots=True)
class _Step:
    """What the attention modules of one model work on now; set around each forward."""

    meta: StepMeta | None = None
    pool: KvPool | None = None
    layers: list[int] = dataclasses.field(default_factory=list)  # in the order of their calls


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; gives
    [1, T, heads, dim]."""
    step, layer = _step_of(module), int(module.layer_idx)  # type: ignore[arg-type]
    named = [name for name in _IGNORED if options.get(name) is not None]
    if named:
        raise SettingsError([("model", f"attention with {', '.join(named)} is not supported; supported: plain causal")])
    if step.meta is None or step.pool is None:
        raise RuntimeError("the attention of a paged model was called outside its forward")
    _check_shapes(step.pool, key, value)
    step.layers.append(layer)
    step.pool.write(layer, step.meta.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1).contiguous()
    return paged_attention(rows, step.pool, layer, step.meta, scale)[None], None


def _step_of(module: torch.nn.Module) -> _Step:
    step = getattr(module, "paged_step", None)
    if not isinstance(step, _Step):
        raise RuntimeError("the attention of a paged model was called from a foreign module")
    return step


def _check_shapes(pool: KvPool, key: torch.Tensor, value: torch.Tensor) -> None:
    heads, dim = pool.blocks.shape[-2:]
    for name, tensor in (("keys", key), ("values", value)):
        found = (tensor.shape[1], tensor.shape[3])
        if found != (heads, dim):
            raise SettingsError(
                [("model", f"{name} of {found[0]} heads of {found[1]}; its configuration says {heads} of {dim}")]
            )


class _Product(torch.nn.Module):
    """A linear layer whose matrix is kept in a form of engine.models.matrix."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None, outs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix, self.bias, self.out_features = matrix, bias, outs
        self.weight = torch.empty(0, dtype=dtype)  # models ask it for its dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x.reshape(-1, x.shape[-1]), self.matrix, self.bias).view(*x.shape[:-1], self.out_features)


def _prepare_products(model: torch.nn.Module, form: MatrixForm) -> None:
    if form is plain:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                outs, dtype = child.out_features, child.weight.dtype
                setattr(parent, name, _Product(form(child.weight), child.bias, outs, dtype))


class HFModel:
    """Computes what `registry.Model` says, with transformers' definition of the model."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> None:
        if weights.group.part.ranks > 1:
            raise SettingsError(
                [("tp_size", f"{weights.group.part.ranks}: models run by transformers are not divided")]
            )
        self.vocab_size = int(config["vocab_size"])
        self._step = _Step()
        self._model = _load(weights, dtype)
        parameters = inspect.signature(self._model.forward).parameters
        if "position_ids" not in parameters:
            raise SettingsError([("model", f"{_name(self._model)} takes no position ids, so rows cannot be packed")])
        self._selects_rows = "logits_to_keep" in parameters
        _prepare_products(self._model, weights.form)
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_step = self._step
        self._verify(dtype)

    def forward(self, ids: torch.Tensor, meta: StepMeta, pool: KvPool) -> torch.Tensor:
        """See registry.Model."""
        self._step.meta, self._step.pool = meta, pool
        self._step.layers.clear()
        rows = {"logits_to_keep": meta.wanted} if self._selects_rows else {}
        try:
            out = self._model(input_ids=ids[None], position_ids=meta.positions[None], use_cache=False, **rows)
        finally:
            self._step.meta = self._step.pool = None
        logits: torch.Tensor = out.logits[0]
        return (logits if self._selects_rows else logits[meta.wanted])[:, : self.vocab_size]

    def _verify(self, dtype: torch.dtype) -> None:
        """Two short sequences, cut into chunks over scattered blocks, against the model's own attention."""
        sequences = [[(7 * at + 3) % self.vocab_size for at in range(count)] for count in (11, 6)]
        expected = []
        self._model.set_attn_implementation("eager")
        for sequence in sequences:
            out = self._model(input_ids=torch.tensor([sequence]), use_cache=False)
            expected.append(out.logits[0, -1, : self.vocab_size])
        self._model.set_attn_implementation(_ATTENTION)
        pool = _probe_pool(self._model.config, dtype)
        first, second = sequences
        tables = [[3, 0, 2], [1, 4]]
        self._run([Chunk(first[:5], 0, tables[0], False)], pool)
        chunks = [Chunk(first[5:], 5, tables[0], True), Chunk(second, 0, tables[1], True)]
        found = self._run(chunks, pool)
        if sorted(self._step.layers) != list(range(len(pool.keys))):
            calls = f"of its {len(pool.keys)} layers, {len(set(self._step.layers))} use ordinary attention"
            raise SettingsError([("model", f"{_name(self._model)}: {calls}; supported: all")])
        scale = max(float(logits.abs().max()) for logits in expected)
        off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale
        if not off < (2e-3 if dtype == torch.float32 else 0.1):
            what = f"paged attention is off by {off:.1e} of the largest logit"
            raise SettingsError([("model", f"{_name(self._model)}: {what}; supported: plain causal attention")])

    def _run(self, chunks: list[Chunk], pool: KvPool) -> torch.Tensor:
        ids, meta = StepMeta.of(chunks, pool.page)
        pool.clear_tails(fresh_tails(chunks, pool.page))
        return self.forward(ids, meta, pool)


def _load(weights: Weights, dtype: torch.dtype) -> Any:
    import transformers

    library: Any = transformers
    library.AttentionInterface.register(_ATTENTION, _attention)
    library.utils.logging.disable_progress_bar()
    try:
        model: Any = library.AutoModelForCausalLM.from_pretrained(
            weights.path, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise SettingsError([("model", f"transformers does not load {weights.path}: {error}")]) from error
    if not getattr(model, "_supports_attention_backend", False):
        raise SettingsError([("model", f"{_name(model)}: its attention in transformers cannot be replaced")])
    return model.eval()


def _probe_pool(config: Any, dtype: torch.dtype) -> KvPool:
    from engine.models.fallback import kv_sizes

    layers, heads, dim = kv_sizes(config.to_dict())
    shape = (layers, 4, heads, dim)
    pool = KvPool(bytearray(5 * KvPool.bytes_per_block(*shape, dtype)), 5, *shape, dtype)
    pool.blocks.fill_(float("nan"))  # as in a real pool, slots past a sequence's end hold anything
    return pool


def _name(model: Any) -> str:
    return type(model).__name__
