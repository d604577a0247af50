"""The Llama family: Llama, Mistral, Qwen2 (biases) and Qwen3 (normalised query and key heads).

q, k, v and gate, up are one product each. Matrices are kept as [in, out]: on AVX2 a product with one row is 1.2 to 1.7
times faster that way, and none is slower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import StepMeta, paged_attention
from engine.kv_pool import KvPool
from engine.models.rope import Rotary
from engine.weights import Weights
from kvstore.errors import SettingsError


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaShape:
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape:
        """From a config.json. SettingsError for what this code does not compute."""
        problems = [
            (f"model.{key}", f"{config[key]!r} is not supported; supported: {allowed}")
            for key, allowed, bad in (
                ("hidden_act", "silu", config.get("hidden_act", "silu") not in ("silu", "swish")),
                ("sliding_window", "null", _uses_sliding_window(config)),
            )
            if bad
        ]
        if problems:
            raise SettingsError(problems)
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
        )


def _uses_sliding_window(config: Mapping[str, Any]) -> bool:
    """Qwen's configurations name a window that `use_sliding_window` switches off."""
    window = config.get("sliding_window")
    return window is not None and config.get("use_sliding_window", True) is not False


@dataclasses.dataclass(slots=True)
class Layer:
    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [hidden, (heads + 2 kv_heads) * head_dim]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: torch.Tensor  # [heads * head_dim, hidden]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [hidden, 2 intermediate]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [intermediate, hidden]
    down_bias: torch.Tensor | None


class _LayerReader:
    """Reads one layer's tensors from a checkpoint into the fused form."""

    def __init__(self, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        self.weights, self.prefix, self.dtype = weights, prefix, dtype

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.weights.get(self.prefix + name, (size,), self.dtype)

    def optional(self, name: str, size: int) -> torch.Tensor | None:
        return self.vector(name, size) if self.prefix + name in self.weights else None

    def fused(self, names: tuple[str, ...], outs: tuple[int, ...], inner: int) -> torch.Tensor:
        """[inner, sum(outs)] of the named projections."""
        parts = [
            self.weights.get(f"{self.prefix}{name}.weight", (out, inner), self.dtype)
            for name, out in zip(names, outs, strict=True)
        ]
        return torch.cat(parts).t().contiguous()

    def fused_bias(self, names: tuple[str, ...], outs: tuple[int, ...]) -> torch.Tensor | None:
        parts = [self.optional(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)]
        present = [part for part in parts if part is not None]
        if present and len(present) != len(parts):
            raise SettingsError([("model", f"{self.prefix}: only some of {names} have a bias")])
        return torch.cat(present) if present else None


def _read_layer(weights: Weights, index: int, shape: LlamaShape, dtype: torch.dtype) -> Layer:
    reader = _LayerReader(weights, f"model.layers.{index}.", dtype)
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return Layer(
        attention_norm=reader.vector("input_layernorm.weight", shape.hidden),
        qkv=reader.fused(qkv, (wide, narrow, narrow), shape.hidden),
        qkv_bias=reader.fused_bias(qkv, (wide, narrow, narrow)),
        query_norm=reader.optional("self_attn.q_norm.weight", shape.head_dim),
        key_norm=reader.optional("self_attn.k_norm.weight", shape.head_dim),
        output=reader.fused(("self_attn.o_proj",), (shape.hidden,), wide),
        output_bias=reader.fused_bias(("self_attn.o_proj",), (shape.hidden,)),
        mlp_norm=reader.vector("post_attention_layernorm.weight", shape.hidden),
        gate_up=reader.fused(gate_up, (shape.intermediate, shape.intermediate), shape.hidden),
        gate_up_bias=reader.fused_bias(gate_up, (shape.intermediate, shape.intermediate)),
        down=reader.fused(("mlp.down_proj",), (shape.hidden,), shape.intermediate),
        down_bias=reader.fused_bias(("mlp.down_proj",), (shape.hidden,)),
    )


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


class LlamaFamily:
    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> None:
        shape = self.shape = LlamaShape.of(config)
        self.vocab_size = shape.vocab_size
        self.scale = shape.head_dim**-0.5
        self.rotary = Rotary(config, shape.head_dim)
        table = (shape.vocab_size, shape.hidden)
        # [hidden, vocab]: the head's form. Looking up a few columns costs little, a second copy would cost much.
        self.embedding = weights.get("model.embed_tokens.weight", table, dtype).t().contiguous()
        self.head = self.embedding if shape.tied else weights.get("lm_head.weight", table, dtype).t().contiguous()
        self.layers = [_read_layer(weights, index, shape, dtype) for index in range(shape.layers)]
        self.norm = weights.get("model.norm.weight", (shape.hidden,), dtype)

    def forward(self, ids: torch.Tensor, meta: StepMeta, pool: KvPool) -> torch.Tensor:
        """See registry.Model."""
        x = self.embedding.index_select(1, ids).t().contiguous()
        cos, sin = self.rotary.at(meta.positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, self._norm(x, layer.attention_norm), cos, sin, meta, pool)
            if index == last:  # beyond the last attention only the wanted rows matter
                x, attended = x[meta.wanted], attended[meta.wanted]
            x = x + _linear(attended, layer.output, layer.output_bias)
            gate, up = _linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(x, self.norm) @ self.head

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        meta: StepMeta,
        pool: KvPool,
    ) -> torch.Tensor:
        """Stores this step's K and V; gives the attended rows [T, heads * head_dim]."""
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv = _linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
            rotated = self.rotary.rotate(torch.cat((query, key), dim=1), cos, sin)
        else:
            rotated = self.rotary.rotate(qkv[:, : heads + kv_heads], cos, sin)
        pool.write(index, meta.slots, rotated[:, heads:], value)
        return paged_attention(rotated[:, :heads], pool, index, meta, self.scale).reshape(-1, heads * dim)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)
