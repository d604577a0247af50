"""Which models transformers may run over the pool, judged by their config.json; no torch and no transformers here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from engine.models.llama_shape import uses_sliding_window, with_defaults
from kvstore.errors import SettingsError

_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
}
"""Older configurations' names of what the engine wants to know."""

_STATE_SPACE = (
    "Mamba",
    "Mamba2",
    "FalconMamba",
    "Rwkv",
    "Jamba",
    "Bamba",
    "Zamba",
    "Zamba2",
    "RecurrentGemma",
    "xLSTM",
)
_SIGNS = {
    "is_encoder_decoder": "an encoder-decoder model",
    "kv_lora_rank": "latent attention (MLA)",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_num_key_heads": "linear-attention layers",
    "alibi": "attention biases (ALiBi)",
    "attention_chunk_size": "chunked attention",
    "attn_logit_softcapping": "soft-capped attention",
}


def canonical(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with older names of sizes completed by the usual ones."""
    found = dict(config)
    for name, others in _ALIASES.items():
        value = next((config[other] for other in (name, *others) if config.get(other) is not None), None)
        if value is not None:
            found[name] = value
    if found.get("multi_query") and not found.get("new_decoder_architecture"):
        found["num_key_value_heads"] = 1
    return found


def kv_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, KV heads and head size. KeyError for a size that is missing."""
    full = canonical(with_defaults(config))
    heads = full["num_attention_heads"]
    kv_heads = full.get("num_key_value_heads") or heads
    head_dim = full.get("head_dim") or full["hidden_size"] // heads
    return int(full["num_hidden_layers"]), int(kv_heads), int(head_dim)


def why_not(config: Mapping[str, Any], architecture: str) -> str | None:
    """What keeps transformers' model of this architecture from running over the pool; None if nothing is known to."""
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "no decoder-only language model"
    if architecture.removesuffix("ForCausalLM") in _STATE_SPACE:
        return "state-space layers"
    for key, what in _SIGNS.items():
        if config.get(key):
            return what
    kinds = {kind for kind in config.get("layer_types") or [] if kind != "full_attention"}
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if uses_sliding_window(config):
        return f"a sliding window of {config.get('sliding_window')} tokens"
    if importlib.util.find_spec("transformers") is None:
        return "a model that needs transformers: pip install 'trtllm-disagg[hf]'"
    return None


def check_quantisation(config: Mapping[str, Any]) -> None:
    """SettingsError for a checkpoint whose safetensors do not hold plain numbers."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings:
        method = settings.get("quant_method", "unnamed") if isinstance(settings, Mapping) else settings
        supported = "float32, bfloat16 or float16 safetensors, GGUF files, and weight_dtype int8 for either"
        raise SettingsError([("model.quantization_config", f"{method!r} is not supported; supported: {supported}")])


def check(config: Mapping[str, Any], architecture: str, families: list[str]) -> None:
    """SettingsError, with the list of what is supported, if this model cannot be run."""
    reason = why_not(config, architecture)
    if reason is not None:
        supported = f"{', '.join(families)}, and other decoders with full attention that transformers defines"
        raise SettingsError(
            [("model.architectures", f"{architecture} is not supported: {reason}; supported: {supported}")]
        )
