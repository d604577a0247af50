"""Where the engine computes, and what that changes in its configuration. Importing this needs no Triton."""

from __future__ import annotations

import importlib.util
import logging

import msgspec
import torch

from engine.config import EngineConfig
from kvstore.errors import SettingsError

log = logging.getLogger(__name__)

DEVICE_TRANSFERS = ("cuda_ipc",)
"""Hand-off paths that read and write KV in device memory; the others take the host's pages."""


def runs_on_cuda(config: EngineConfig) -> bool:
    """What `device` asks for; "auto" is the GPU where there is one. SettingsError if it cannot be had."""
    if config.device not in ("auto", "cpu", "cuda"):
        raise SettingsError([("device", f"{config.device!r} is not supported; supported: auto, cpu, cuda")])
    there = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if config.device == "cuda" and not there:
        raise SettingsError([("device", "cuda: torch sees no CUDA device, or Triton is not installed")])
    if config.kv_cache_dtype != "auto" and not (there and config.device != "cpu"):
        raise SettingsError([("kv_cache_dtype", f"{config.kv_cache_dtype!r} needs a GPU; supported here: auto")])
    return there and config.device != "cpu"


def on_device(config: EngineConfig) -> EngineConfig:
    """The configuration without the hand-off paths that cannot reach device memory; a request that would have used
    one is recomputed. SettingsError for a pool of KV blocks, which takes them from the host's pages only."""
    if config.pool is not None:
        raise SettingsError([("kv_connector_config", "the Mooncake pool cannot hold blocks of a GPU's KV cache")])
    kept = tuple(name for name in config.transfers if name in DEVICE_TRANSFERS)
    dropped = [name for name in config.transfers if name not in DEVICE_TRANSFERS and name != "pool"]
    if dropped and config.role != "aggregated":
        log.warning("KV is in device memory, which %s cannot reach: hand-offs are recomputed", ", ".join(dropped))
    return msgspec.structs.replace(config, transfers=kept)
