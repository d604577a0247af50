"""A checkpoint's tensors by Hugging Face name, read one at a time from safetensors or GGUF files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from engine import gguf_file
from engine.checkpoint import Checkpoint
from kvstore.errors import SettingsError


class Weights:
    """The tensors of one checkpoint. A context manager: files stay open until it exits.

    `progress` is called with the share of tensors read so far, 0 < done <= 1.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Callable[[float], None] = lambda done: None) -> None:
        self._path = checkpoint.path
        self._progress = progress
        self._read = 0
        self._readers: dict[str, Callable[[], torch.Tensor]] = {}
        self._open: list[Any] = []
        if checkpoint.is_gguf:
            self._add_gguf(checkpoint.path)
        else:
            for file in checkpoint.weight_files:
                self._add_safetensors(str(file))

    def _add_gguf(self, path: str) -> None:
        file = gguf_file.GgufFile(path)
        for name, gguf_name in gguf_file.hf_tensor_names(file).items():
            self._readers[name] = functools.partial(_gguf_tensor, file, gguf_name)

    def _add_safetensors(self, path: str) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise SettingsError([("model", f"{path} cannot be read: {error}")]) from error
        self._open.append(file)
        for name in file.keys():  # noqa: SIM118 - not a mapping
            self._readers[name] = functools.partial(file.get_tensor, name)

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def names(self) -> Iterable[str]:
        return self._readers.keys()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`. SettingsError if it is missing or has another shape."""
        if name not in self._readers:
            raise SettingsError([("model", f"{self._path} has no tensor {name!r}")])
        tensor = self._readers[name]()
        if tuple(tensor.shape) != shape:
            raise SettingsError([("model", f"tensor {name!r} of {self._path} is {tuple(tensor.shape)}, not {shape}")])
        self._read += 1
        self._progress(min(1.0, self._read / len(self._readers)))
        return tensor.to(dtype)

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.clear()
        self._open.clear()  # safe_open unmaps its file when it is dropped


def _gguf_tensor(file: gguf_file.GgufFile, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf_file.hf_tensor(file, name))
