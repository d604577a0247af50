"""Rotary position embedding: frequencies of the schemes that config.json can name, and the rotation of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.models.llama_shape import with_defaults
from kvstore.errors import SettingsError

SCHEMES = ("default", "dynamic", "factors", "linear", "llama3", "yarn")


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation's settings, in whichever of the places config.json may have them; `rope_theta` among them."""
    config = with_defaults(config)
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    found["rope_theta"] = found.get("rope_theta") or config.get("rope_theta") or 10000.0
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    found.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    return found


def rotated_size(config: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's first numbers are rotated."""
    return int(head_dim * parameters_of(config)["partial_rotary_factor"])


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """[rotated_size / 2] radians a position. SettingsError for a scheme that is none of SCHEMES."""
    parameters = parameters_of(config)
    theta, scheme = parameters["rope_theta"], parameters["rope_type"]
    size = rotated_size(config, head_dim)
    plain: torch.Tensor = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    if scheme in ("default", "dynamic"):
        # Dynamic scaling starts beyond max_position_embeddings, where no sequence of this engine gets.
        return plain
    if scheme == "linear":
        return plain / float(parameters["factor"])
    if scheme == "llama3":
        return _llama3(plain, parameters)
    if scheme == "yarn":
        return _yarn(plain, theta, size, parameters, config)
    if scheme == "factors":  # one divisor a frequency, as GGUF files have them
        return plain / torch.tensor(parameters["factors"], dtype=torch.float32)
    raise SettingsError([("model.rope_type", f"{scheme!r} is not supported; supported: {', '.join(SCHEMES)}")])


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = float(parameters["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / float(parameters["factor"]) + kept * plain


def _yarn_factor(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """How far the context is stretched."""
    original = parameters.get("original_max_position_embeddings")
    stretched = config["max_position_embeddings"] / original if original else None
    return float(parameters.get("factor") or stretched or 1.0)


def _yarn(
    plain: torch.Tensor, theta: float, size: int, parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn little are slowed."""
    factor = _yarn_factor(parameters, config)
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def attention_factor(config: Mapping[str, Any]) -> float:
    """By how much cosines and sines are scaled: YaRN sharpens the attention of a stretched context."""
    parameters = parameters_of(config)
    if parameters["rope_type"] != "yarn":
        return 1.0
    if parameters.get("attention_factor"):
        return float(parameters["attention_factor"])
    factor = _yarn_factor(parameters, config)

    def sharpening(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return sharpening(parameters["mscale"]) / sharpening(parameters["mscale_all_dim"])
    return sharpening(1.0)


class Rotary:
    """Cosines and sines of all positions of a model, in float32; rotates the two halves of each head's first part."""

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        positions = torch.arange(config["max_position_embeddings"]).float()
        angles = positions[:, None] * inverse_frequencies(config, head_dim)
        factor = attention_factor(config)
        self.size = rotated_size(config, head_dim)
        self.cos, self.sin = angles.cos() * factor, angles.sin() * factor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, size / 2] of positions [T]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Heads [T, H, head_dim] turned to their positions, in the heads' dtype."""
        out = torch.empty(heads.shape, dtype=torch.result_type(heads, cos), device=heads.device)
        first, second = heads[..., : self.size].chunk(2, dim=-1)
        turned_first, turned_second = out[..., : self.size].chunk(2, dim=-1)
        torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
        out[..., self.size :] = heads[..., self.size :]
        return out.to(heads.dtype)
