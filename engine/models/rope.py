"""Rotary position embedding: frequencies of the schemes that config.json can name, and the rotation of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.errors import SettingsError


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians a position. Schemes: default, linear, llama3. SettingsError for others."""
    parameters = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise SettingsError([("model.partial_rotary_factor", "rotating a part of each head is not supported")])
    scheme = parameters.get("rope_type") or parameters.get("type") or "default"
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain: torch.Tensor = 1.0 / (theta**exponents)
    if scheme == "default":
        return plain
    if scheme == "linear":
        return plain / float(parameters["factor"])
    if scheme == "llama3":
        return _llama3(plain, parameters)
    raise SettingsError([("model.rope_type", f"{scheme!r} is not supported; supported: default, linear, llama3")])


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = float(parameters["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / float(parameters["factor"]) + kept * plain


class Rotary:
    """Cosines and sines of all positions of a model, in float32; rotates the two halves of each head."""

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        positions = torch.arange(config["max_position_embeddings"]).float()
        angles = positions[:, None] * inverse_frequencies(config, head_dim)
        self.cos, self.sin = angles.cos(), angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_dim / 2] of positions [T]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]

    @staticmethod
    def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Heads [T, H, head_dim] turned to their positions, in the heads' dtype."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
