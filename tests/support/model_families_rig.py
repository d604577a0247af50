"""Small random checkpoints, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def save_random(folder: Path, kind: str, options: dict[str, Any], shards: str = "1GB") -> Any:
    """Saves a random model of `SMALL` sizes changed by `options`; returns transformers' model."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SMALL | options)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # fresh biases are 0 and norms 1: a mix-up would not show
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    model.save_pretrained(folder, max_shard_size=shards)
    return model.eval()
