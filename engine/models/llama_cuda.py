"""The Llama family on a CUDA device: the weights in the kernels' form, and the launches of a decode and a prefill.

Every call only enqueues work on the current stream and reads no result, so both can be captured into CUDA graphs.
Residual rows are updated in place by the products that end a sublayer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.kernels.decode_attention import DecodeScratch, Heads, cut_for, decode_attention
from engine.kernels.elementwise import Argmax, rms_norm, rope_and_store, silu_mul
from engine.kernels.linear import SplitScratch, linear
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.tiles import Product, tile_for
from engine.kv_pool import KvPool
from engine.models.llama_shape import LlamaShape
from engine.models.rope import Rotary
from kvstore.errors import SettingsError


class TensorSource(Protocol):
    """What the loader needs of `engine.weights.Weights`."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


@dataclasses.dataclass(slots=True)
class CudaLayer:
    """Matrices as [out, in], the form in which checkpoints hold them and products of few rows read them fastest."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class _Reader:
    def __init__(self, weights: TensorSource, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.prefix, self.dtype, self.device = weights, prefix, dtype, device

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.get(self.prefix + name, shape, self.dtype).to(self.device)

    def optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.get(name, *shape) if self.prefix + name in self.weights else None

    def stacked(self, fused: str, names: tuple[str, ...], outs: tuple[int, ...], inner: int) -> torch.Tensor:
        """The projections under one another; some checkpoints hold them so, under the name `fused`."""
        if f"{self.prefix}{fused}.weight" in self.weights:
            return self.get(f"{fused}.weight", sum(outs), inner)
        parts = [self.get(f"{name}.weight", out, inner) for name, out in zip(names, outs, strict=True)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def stacked_bias(self, names: tuple[str, ...], outs: tuple[int, ...]) -> torch.Tensor | None:
        parts = [self.optional(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)]
        present = [part for part in parts if part is not None]
        if present and len(present) != len(parts):
            raise SettingsError([("model", f"{self.prefix}: only some of {names} have a bias")])
        return torch.cat(present) if present else None


def _read_layer(reader: _Reader, shape: LlamaShape) -> CudaLayer:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return CudaLayer(
        attention_norm=reader.get("input_layernorm.weight", shape.hidden),
        qkv=reader.stacked("self_attn.qkv_proj", qkv, (wide, narrow, narrow), shape.hidden),
        qkv_bias=reader.stacked_bias(qkv, (wide, narrow, narrow)),
        query_norm=reader.optional("self_attn.q_norm.weight", shape.head_dim),
        key_norm=reader.optional("self_attn.k_norm.weight", shape.head_dim),
        output=reader.stacked("", ("self_attn.o_proj",), (shape.hidden,), wide),
        output_bias=reader.stacked_bias(("self_attn.o_proj",), (shape.hidden,)),
        mlp_norm=reader.get("post_attention_layernorm.weight", shape.hidden),
        gate_up=reader.stacked("mlp.gate_up_proj", gate_up, (shape.intermediate, shape.intermediate), shape.hidden),
        gate_up_bias=reader.stacked_bias(gate_up, (shape.intermediate, shape.intermediate)),
        down=reader.stacked("", ("mlp.down_proj",), (shape.hidden,), shape.intermediate),
        down_bias=reader.stacked_bias(("mlp.down_proj",), (shape.hidden,)),
    )


class DecodeState:
    """Inputs, results and work space of decode steps of up to `rows` rows; steps of fewer use the first ones."""

    def __init__(self, model: LlamaCuda, rows: int, max_blocks: int, kv_dtype: torch.dtype, page_layers: int) -> None:
        shape, device, dtype = model.shape, model.device, model.dtype
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        def empty(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*size, dtype=of, device=device)

        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)  # 0: a padding row
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.staged = empty(rows, page_layers, 2, shape.kv_heads, shape.head_dim, of=kv_dtype)
        self.logits = empty(rows, shape.vocab_size, of=torch.float32)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.best = torch.zeros(rows, dtype=torch.float32, device=device)
        self.residual, self.normed = empty(rows, shape.hidden), empty(rows, shape.hidden)
        self.qkv, self.attended = empty(rows, qkv), empty(rows, shape.heads * shape.head_dim)
        self.gate_up, self.activated = empty(rows, 2 * shape.intermediate), empty(rows, shape.intermediate)
        self.attention = DecodeScratch(rows, model.heads, 32, device)
        self.argmax = Argmax(rows, device)


@dataclasses.dataclass(slots=True)
class PrefillInputs:
    """Packed prompt chunks, on the device. Rows beyond starts[-1] are padding (slot -1)."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int32: block * page + offset
    starts: torch.Tensor  # [S + 1] int32
    lengths: torch.Tensor  # [S] int32: tokens of the sequence with its chunk; 0: no sequence
    tables: torch.Tensor  # [S, max_blocks] int32
    fresh: bool = False  # one sequence from its first token on: nothing to attend to but the chunk itself


class LlamaCuda:
    """SettingsError for configurations that `LlamaShape` refuses."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        pdl: bool | None = None,
    ) -> None:
        shape = self.shape = LlamaShape.of(config)
        _refuse_what_has_no_kernel(shape)
        self.vocab_size, self.dtype, self.device = shape.vocab_size, dtype, device
        rotary = Rotary(config, shape.head_dim)
        cos, sin = rotary.cos.to(device).contiguous(), rotary.sin.to(device).contiguous()
        self.heads = Heads(
            shape.heads, shape.kv_heads, shape.head_dim, 2 * cos.shape[1], shape.head_dim**-0.5, shape.eps, cos, sin
        )
        plain = dataclasses.replace(self.heads, rotary_dim=0)
        self.heads_of = [self.heads if turns else plain for turns in shape.rotates or (True,) * shape.layers]
        reader = _Reader(weights, "", dtype, device)
        self.embedding = reader.get("model.embed_tokens.weight", shape.vocab_size, shape.hidden)
        tied = shape.tied or "lm_head.weight" not in weights
        self.head = self.embedding if tied else reader.get("lm_head.weight", shape.vocab_size, shape.hidden)
        self.layers = [
            _read_layer(_Reader(weights, f"model.layers.{index}.", dtype, device), shape)
            for index in range(shape.layers)
        ]
        self.norm = reader.get("model.norm.weight", shape.hidden)
        properties = torch.cuda.get_device_properties(device)
        # Programmatic dependent launch is a feature of Hopper and later.
        self.pdl = properties.major >= 9 if pdl is None else pdl
        self.scratch = SplitScratch(device)

    # ------------------------------------------------------------ products

    def _product(
        self,
        product: Product,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        normed: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> None:
        """out (+)= norm(x) @ weight.T + bias by our kernel where it is faster, else by cuBLAS. `normed`: work space."""
        tile = tile_for(product, x.shape[0])
        add = product in (Product.OUTPUT, Product.DOWN)
        if tile is not None:
            scratch = self.scratch if tile.split > 1 else None
            if norm is not None and not tile.norms:
                x, norm = rms_norm(x, norm, self.shape.eps, normed, pdl=self.pdl), None
            linear(
                x, weight, out, tile, bias=bias, norm=norm, eps=self.shape.eps, add=add, scratch=scratch, pdl=self.pdl
            )
            return
        if norm is not None:
            x = rms_norm(x, norm, self.shape.eps, normed, pdl=self.pdl)
        if add:
            out.addmm_(x, weight.t())
        elif out.dtype == x.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            out.copy_(x @ weight.t())
        if bias is not None:
            out.add_(bias)

    def _mlp(self, layer: CudaLayer, state: DecodeState, rows: int) -> None:
        x, activated, normed = state.residual[:rows], state.activated[:rows], state.normed[:rows]
        tile = tile_for(Product.GATE_UP, rows)
        if tile is not None:
            norm: torch.Tensor | None = layer.mlp_norm
            source = x
            if not tile.norms:
                source, norm = rms_norm(x, layer.mlp_norm, self.shape.eps, normed, pdl=self.pdl), None
            linear(
                source, layer.gate_up, activated, tile, bias=layer.gate_up_bias, norm=norm, eps=self.shape.eps,
                silu=True, pdl=self.pdl,
            )  # fmt: skip
        else:
            both = state.gate_up[:rows]
            torch.mm(rms_norm(x, layer.mlp_norm, self.shape.eps, normed, pdl=self.pdl), layer.gate_up.t(), out=both)
            if layer.gate_up_bias is not None:
                both.add_(layer.gate_up_bias)
            silu_mul(both, activated, pdl=self.pdl)
        self._product(Product.DOWN, activated, layer.down, x, normed, bias=layer.down_bias)

    # ------------------------------------------------------------ steps

    def decode(self, state: DecodeState, rows: int, pool: KvPool) -> None:
        """One token for each of the first `rows` rows: logits, tokens (greedy) and best logits into the state, the
        new K and V into its `staged`; the pool is only read."""
        x, normed, qkv = state.residual[:rows], state.normed[:rows], state.qkv[:rows]
        attended = state.attended[:rows]
        cut = cut_for(rows, self.shape.kv_heads)
        torch.index_select(self.embedding, 0, state.ids[:rows], out=x)
        for index, layer in enumerate(self.layers):
            self._product(Product.QKV, x, layer.qkv, qkv, normed, bias=layer.qkv_bias, norm=layer.attention_norm)
            decode_attention(
                qkv, pool.keys[index], pool.values[index], state.tables[:rows], state.lengths[:rows],
                state.staged[:rows, index], attended, self.heads_of[index], state.attention,
                query_norm=layer.query_norm, key_norm=layer.key_norm, cut=cut, pdl=self.pdl,
            )  # fmt: skip
            self._product(Product.OUTPUT, attended, layer.output, x, normed, bias=layer.output_bias)
            self._mlp(layer, state, rows)
        self.head_logits(x, normed, state.logits[:rows])
        state.argmax(state.logits[:rows], state.tokens[:rows], state.best[:rows], pdl=self.pdl)

    def head_logits(self, x: torch.Tensor, normed: torch.Tensor, logits: torch.Tensor) -> None:
        """logits [B, vocab_size] float32 of residual rows x [B, hidden]."""
        self._product(Product.HEAD, x, self.head, logits, normed, norm=self.norm)

    def prefill(self, inputs: PrefillInputs, pool: KvPool) -> torch.Tensor:
        """Stores K and V of the chunks in the pool; gives their residual rows [T, hidden] after the last layer."""
        shape, heads = self.shape, self.heads
        x = F.embedding(inputs.ids, self.embedding)
        normed = torch.empty_like(x)
        turned = x.new_empty(len(x), (heads.heads + heads.kv_heads) * heads.dim)
        attended = x.new_zeros(len(x), heads.heads * heads.dim)  # attention leaves padding rows alone
        activated = x.new_empty(len(x), shape.intermediate)
        fresh = inputs.fresh and keys_are_exact(pool, self.dtype)
        for index, layer in enumerate(self.layers):
            keys, values = pool.keys[index], pool.values[index]
            qkv = F.linear(rms_norm(x, layer.attention_norm, shape.eps, normed), layer.qkv, layer.qkv_bias)
            rope_and_store(
                qkv,
                inputs.positions,
                inputs.slots,
                keys,
                values,
                turned,
                self.heads_of[index],
                layer.query_norm,
                layer.key_norm,
            )
            if fresh:
                attended = self._attend_to_itself(turned, qkv)
            else:
                prefill_attention(
                    turned[:, : heads.heads * heads.dim], keys, values, inputs.tables, inputs.starts, inputs.lengths,
                    heads, attended,
                )  # fmt: skip
            _add_product(x, attended, layer.output, layer.output_bias)
            both = F.linear(rms_norm(x, layer.mlp_norm, shape.eps, normed), layer.gate_up, layer.gate_up_bias)
            _add_product(x, silu_mul(both, activated), layer.down, layer.down_bias)
        return x

    def _attend_to_itself(self, turned: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Causal attention of one sequence's first chunk; padding rows stand behind it and are seen by none."""
        heads, rows = self.heads, len(turned)
        both = turned.view(1, rows, heads.heads + heads.kv_heads, heads.dim).transpose(1, 2)
        values = qkv.view(1, rows, heads.heads + 2 * heads.kv_heads, heads.dim)[:, :, heads.heads + heads.kv_heads :]
        out = F.scaled_dot_product_attention(
            both[:, : heads.heads], both[:, heads.heads :], values.transpose(1, 2),
            is_causal=True, scale=heads.scale, enable_gqa=heads.heads > heads.kv_heads,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(rows, heads.heads * heads.dim)


def _refuse_what_has_no_kernel(shape: LlamaShape) -> None:
    problems = []
    if shape.head_dim & (shape.head_dim - 1):
        problems.append(("model.head_dim", f"{shape.head_dim} is not supported on a GPU; supported: powers of two"))
    if any(shape.sparse):
        problems.append(("model.architectures", "experts are not supported on a GPU"))
    if problems:
        raise SettingsError(problems)


def keys_are_exact(pool: KvPool, dtype: torch.dtype) -> bool:
    """Whether the pool gives back the K and V that were stored in it: a rounded pool must be attended to itself, or
    the tokens would depend on where a prompt is cut into chunks."""
    return pool.dtype == dtype


def _add_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    out.addmm_(x, weight.t())
    if bias is not None:
        out.add_(bias)
