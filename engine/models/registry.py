"""Which class runs which `architectures` entry of a config.json. Importing this needs no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.models import fallback
from kvstore.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from engine.attention import StepMeta
    from engine.kv_pool import KvPool
    from engine.weights import Weights


class Model(Protocol):
    """A decoder over the paged pool."""

    vocab_size: int

    def forward(self, ids: torch.Tensor, meta: StepMeta, pool: KvPool) -> torch.Tensor:
        """Writes K and V of `ids` [T] (int64, packed) into the pool's slots of `meta`; gives the logits
        [len(meta.wanted), vocab_size] of the rows in `meta.wanted`."""
        ...


ModelFactory = Callable[[Mapping[str, Any], "Weights", "torch.dtype"], Model]
"""(config.json, weights, compute dtype) to a model. Raises SettingsError where the configuration is not supported."""


def _llama_family(config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> Model:
    from engine.models.llama import LlamaFamily

    return LlamaFamily(config, weights, dtype)


_FACTORIES: dict[str, ModelFactory] = dict.fromkeys(
    (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    _llama_family,
)


def register_architecture(name: str, factory: ModelFactory) -> None:
    """Makes `name`, as it stands in config.json's `architectures`, loadable. A later registration wins."""
    _FACTORIES[name] = factory


def supported_architectures() -> list[str]:
    return sorted(_FACTORIES)


def _transformers_model(config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> Model:
    from engine.models.hf import HFModel

    return HFModel(config, weights, dtype)


def model_factory(config: Mapping[str, Any]) -> ModelFactory:
    """The factory for the first known entry of `architectures`, else transformers' model of the first one.
    SettingsError names what is supported."""
    fallback.check_quantisation(config)
    names = config.get("architectures") or []
    for name in names:
        if name in _FACTORIES:
            return _FACTORIES[name]
    fallback.check(config, str(names[0]) if names else "(none)", supported_architectures())
    return _transformers_model


def load_custom_modules(directories: Sequence[str]) -> list[str]:
    """Runs every *.py of the directories (not below them), in name order; they may call `register_architecture`.

    A file is run once a process, under a module name made from its path. Returns the module names.
    """
    loaded = []
    for directory in directories:
        folder = Path(directory)
        if not folder.is_dir():
            raise SettingsError([("custom_module_dirs", f"{directory!r} is not a directory")])
        for path in sorted(folder.glob("*.py")):
            loaded.append(_load_module(path.resolve()))
    return loaded


def _load_module(path: Path) -> str:
    name = f"custom_module_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SettingsError([("custom_module_dirs", f"{path} cannot be imported")])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's: whatever it raises is told as a setting
        del sys.modules[name]
        raise SettingsError([("custom_module_dirs", f"{path} failed: {type(error).__name__}: {error}")]) from error
    return name
