"""What a config.json of the Llama family says, per architecture: sizes, which layers rotate, which have experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvstore.errors import SettingsError

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"attention_bias": True},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "SmolLM3ForCausalLM": {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5},
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1},
    "MixtralForCausalLM": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
}
"""Architectures that this family computes, with what their config.json may leave out."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts in place of one feed-forward block."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool  # the chosen experts' weights sum to 1


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a model, or of one rank's part of it (see `part`)."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    rotates: tuple[bool, ...] = ()  # per layer; a layer without rotation sees no positions
    sparse: tuple[bool, ...] = ()  # per layer: experts instead of a dense block
    experts: ExpertShape | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape:
        """From a config.json. SettingsError for what this code does not compute."""
        config = with_defaults(config)
        _refuse_what_is_not_computed(config)
        heads = config["num_attention_heads"]
        layers = config["num_hidden_layers"]
        experts = _experts(config)
        return cls(
            vocab_size=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            rotates=_rotating_layers(config, layers),
            sparse=tuple(experts is not None and _is_sparse(config, layer) for layer in range(layers)),
            experts=experts,
        )

    def part(self, ranks: int) -> LlamaShape:
        """One of `ranks` equal parts: heads and inner sizes divided. SettingsError if they do not divide."""
        sizes = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.experts.intermediate if self.experts else 0,
        }
        uneven = [
            ("tp_size", f"{ranks} does not divide {name}, which is {size}")
            for name, size in sizes.items()
            if size % ranks
        ]
        if uneven:
            raise SettingsError(uneven)
        experts = self.experts
        return dataclasses.replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate=self.intermediate // ranks,
            experts=experts and dataclasses.replace(experts, intermediate=experts.intermediate // ranks),
        )


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with what its architecture's config.json may leave out."""
    names = [name for name in config.get("architectures") or [] if name in DEFAULTS]
    given = {key: value for key, value in config.items() if value is not None}
    return {**config, **(DEFAULTS[names[0]] if names else {}), **given}


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    problems = []
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problems.append(("model.hidden_act", f"{activation!r} is not supported; supported: silu"))
    if uses_sliding_window(config):
        window = config.get("sliding_window")
        problems.append(("model.sliding_window", f"{window!r} is not supported; supported: null (full attention)"))
    if problems:
        raise SettingsError(problems)


def uses_sliding_window(config: Mapping[str, Any]) -> bool:
    """Qwen's and SmolLM3's configurations name a window that `use_sliding_window` switches off."""
    if "sliding_attention" in (config.get("layer_types") or []):
        return True
    window = config.get("sliding_window")
    return window is not None and config.get("use_sliding_window", True) is not False


def _rotating_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    named = config.get("no_rope_layers")
    if named:  # 1 marks a layer that does rotate
        return tuple(bool(flag) for flag in named)
    interval = config.get("no_rope_layer_interval")
    return tuple(not interval or (layer + 1) % interval != 0 for layer in range(layers))


def _experts(config: Mapping[str, Any]) -> ExpertShape | None:
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return None
    return ExpertShape(
        count=count,
        per_token=config["num_experts_per_tok"],
        intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        normalised=config.get("norm_topk_prob", False),
    )


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
