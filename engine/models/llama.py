"""The Llama family: one decoder block for Llama, Mistral, Qwen2 (biases), Qwen3 (normalised query and key heads),
SmolLM3 (layers without rotation), Phi-3 (projections fused in the checkpoint), Qwen3-MoE and Mixtral (experts).

q, k, v and gate, up are one product each. Of several ranks each has a share of the heads and of the feed-forward width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import StepMeta, paged_attention
from engine.kv_pool import KvPool
from engine.models.experts import Expert, Experts
from engine.models.llama_shape import LlamaShape
from engine.models.matrix import Matrix, add_product, multiply
from engine.models.rope import Rotary
from engine.parallel import Group
from engine.weights import Weights
from kvstore.errors import SettingsError

__all__ = ["Layer", "LlamaFamily", "LlamaShape"]


@dataclasses.dataclass(slots=True)
class Layer:
    """One block. A dense one has gate_up and down, a sparse one experts."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [hidden, (heads + 2 kv_heads) * head_dim]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: Matrix  # [heads * head_dim, hidden]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Matrix | None  # [hidden, 2 intermediate]
    gate_up_bias: torch.Tensor | None
    down: Matrix | None  # [intermediate, hidden]
    down_bias: torch.Tensor | None
    rotates: bool = True
    experts: Experts | None = None


class LlamaFamily:
    """Computes what `registry.Model` says. `weights` decides the form of the matrices and this rank's part of them."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> None:
        whole = LlamaShape.of(config)
        self.group: Group = weights.group
        shape = self.shape = whole.part(self.group.part.ranks)
        self.vocab_size = shape.vocab_size
        self.scale = shape.head_dim**-0.5
        self.rotary = Rotary(config, shape.head_dim)
        table = (shape.vocab_size, shape.hidden)
        # As [hidden, vocab]. In the plain form a tied head is the same tensor: looking up a few columns costs little.
        name = "model.embed_tokens.weight"
        tied = shape.tied or "lm_head.weight" not in weights
        self.head_is_split = self.group.part.ranks > 1 and shape.vocab_size % self.group.part.ranks == 0
        self.head = weights.matrix(
            name if tied else "lm_head.weight", table, dtype, split=0 if self.head_is_split else None
        )
        if tied and isinstance(self.head, torch.Tensor) and not self.head_is_split:
            self.embedding = self.head
        else:
            self.embedding = weights.get(name, table, dtype).t()
        reader = _Reader(weights, shape, whole, dtype)
        self.layers = [reader.layer(index) for index in range(shape.layers)]
        self.norm = weights.get("model.norm.weight", (shape.hidden,), dtype)

    def forward(self, ids: torch.Tensor, meta: StepMeta, pool: KvPool) -> torch.Tensor:
        """See registry.Model."""
        x = self.embedding.t()[ids]
        cos, sin = self.rotary.at(meta.positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, self._norm(x, layer.attention_norm), cos, sin, meta, pool)
            if index == last:  # beyond the last attention only the wanted rows matter
                x, attended = x[meta.wanted], attended[meta.wanted]
            x = self._add_product(attended, layer.output, layer.output_bias, x)
            x = self._feed_forward(layer, x)
        logits = multiply(self._norm(x, self.norm), self.head)
        return self.group.join(logits) if self.head_is_split else logits

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
        qkv = multiply(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        both, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(both[:, :heads], layer.query_norm), self._norm(both[:, heads:], layer.key_norm)
            both = torch.cat((query, key), dim=1)
        if layer.rotates:
            both = self.rotary.rotate(both, cos, sin)
        pool.write(index, meta.slots, both[:, heads:], value)
        return paged_attention(both[:, :heads], pool, index, meta, self.scale).reshape(-1, heads * dim)

    def _feed_forward(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x, layer.mlp_norm)
        if layer.experts is not None:
            return x + self.group.sum(layer.experts.forward(normed))
        if layer.gate_up is None or layer.down is None:
            raise ValueError("a layer without experts needs gate_up and down")
        gate, up = multiply(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return self._add_product(F.silu(gate).mul_(up), layer.down, layer.down_bias, x)

    def _add_product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, base: torch.Tensor
    ) -> torch.Tensor:
        """base + x @ matrix + bias, where each rank has a part of the inner dimension."""
        if self.group.part.ranks == 1:
            return add_product(x, matrix, bias, base)
        total = self.group.sum(multiply(x, matrix))
        return base + (total if bias is None else total + bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)


class _Reader:
    """Reads layers from a checkpoint into their fused form."""

    def __init__(self, weights: Weights, shape: LlamaShape, whole: LlamaShape, dtype: torch.dtype) -> None:
        self.weights, self.shape, self.whole, self.dtype = weights, shape, whole, dtype
        self.prefix = ""

    def layer(self, index: int) -> Layer:
        self.prefix = f"model.layers.{index}."
        whole, hidden = self.whole, self.whole.hidden
        wide, narrow = whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim
        qkv = self.projections("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        sparse = index < len(whole.sparse) and whole.sparse[index]
        layer = Layer(
            attention_norm=self.vector("input_layernorm.weight", hidden),
            qkv=self.fused(qkv, (wide, narrow, narrow), hidden),
            qkv_bias=self.fused_bias(qkv, (wide, narrow, narrow)),
            query_norm=self.optional("self_attn.q_norm.weight", whole.head_dim),
            key_norm=self.optional("self_attn.k_norm.weight", whole.head_dim),
            output=self.inner("self_attn.o_proj", wide),
            output_bias=self.optional("self_attn.o_proj.bias", hidden),
            mlp_norm=self.vector("post_attention_layernorm.weight", hidden),
            gate_up=None,
            gate_up_bias=None,
            down=None,
            down_bias=None,
            rotates=whole.rotates[index] if whole.rotates else True,
            experts=self.experts() if sparse else None,
        )
        if not sparse:
            gate_up = self.projections("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")
            widths = (whole.intermediate, whole.intermediate)
            layer.gate_up = self.fused(gate_up, widths, hidden)
            layer.gate_up_bias = self.fused_bias(gate_up, widths)
            layer.down = self.inner("mlp.down_proj", whole.intermediate)
            layer.down_bias = self.optional("mlp.down_proj.bias", hidden)
        return layer

    def projections(self, fused: str, *single: str) -> tuple[str, ...]:
        return (fused,) if f"{self.prefix}{fused}.weight" in self.weights else single

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.weights.get(self.prefix + name, (size,), self.dtype)

    def optional(self, name: str, size: int) -> torch.Tensor | None:
        return self.vector(name, size) if self.prefix + name in self.weights else None

    def fused(self, names: tuple[str, ...], outs: tuple[int, ...], inner: int) -> Matrix:
        """[inner, sum(outs)] of the named projections, each rank's share of every one."""
        return self.weights.fused([f"{self.prefix}{name}.weight" for name in names], outs, inner, self.dtype)

    def fused_bias(self, names: tuple[str, ...], outs: tuple[int, ...]) -> torch.Tensor | None:
        if len(names) == 1:
            whole = self.optional(f"{names[0]}.bias", sum(outs))
            parts: list[torch.Tensor | None] = [None] if whole is None else [*torch.split(whole, list(outs))]
        else:
            parts = [self.optional(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)]
        present = [self.weights.group.part.of(part, 0) for part in parts if part is not None]
        if present and len(present) != len(parts):
            raise SettingsError([("model", f"{self.prefix}: only some of {names} have a bias")])
        return torch.cat(present) if present else None

    def inner(self, name: str, width: int) -> Matrix:
        """[width, hidden], of whose `width` each rank has a share: the results add up."""
        return self.weights.matrix(f"{self.prefix}{name}.weight", (self.whole.hidden, width), self.dtype, split=1)

    def experts(self) -> Experts:
        shape, hidden = self.whole.experts, self.whole.hidden
        if shape is None:
            raise ValueError("a sparse layer of a model without experts")
        mixtral = f"{self.prefix}block_sparse_moe.gate.weight" in self.weights
        block, names = (
            ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
        )
        router = self.weights.get(f"{self.prefix}{block}.gate.weight", (shape.count, hidden), self.dtype)
        blocks = []
        for number in range(shape.count):
            gate, up, down = (f"{self.prefix}{block}.experts.{number}.{name}.weight" for name in names)
            widths = (shape.intermediate, shape.intermediate)
            blocks.append(
                Expert(
                    gate_up=self.weights.fused((gate, up), widths, hidden, self.dtype),
                    down=self.weights.matrix(down, (hidden, shape.intermediate), self.dtype, split=1),
                )
            )
        return Experts(self.shape.experts or shape, router.t().contiguous(), blocks)
