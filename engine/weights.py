"""A checkpoint's tensors by Hugging Face name, read one at a time from memory-mapped safetensors or GGUF files."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from engine import gguf_file
from engine.checkpoint import Checkpoint
from engine.models.matrix import Matrix, MatrixForm, plain
from engine.parallel import Alone, Group
from kvstore.errors import SettingsError

_REPORT_SHARE, _REPORT_SECONDS = 0.1, 1.0


class Weights:
    """The tensors of one checkpoint. A context manager: files stay mapped until it exits.

    `form` is how matrices are kept, `group` which part of them. `progress` is called with the share of tensors read,
    0 < done <= 1: every tenth of the way, and every second.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        progress: Callable[[float], None] = lambda done: None,
        form: MatrixForm = plain,
        group: Group | None = None,
    ) -> None:
        self.path = checkpoint.path
        self.is_gguf = checkpoint.is_gguf
        self.form = form
        self.group: Group = group or Alone()
        self._report = progress
        self._reported, self._reported_at = 0.0, time.monotonic()
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
        """The whole tensor in `dtype`, in memory of its own. SettingsError if it is missing or has another shape."""
        tensor = self._mapped(name, shape)
        return tensor.clone() if tensor.dtype == dtype else tensor.to(dtype)

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype, *, split: int | None = None) -> Matrix:
        """A weight [out, in] in the form in which matrices are kept; of dimension `split` only this rank's part."""
        return self.fused([name], [shape[0]], shape[1], dtype, split=split)

    def fused(
        self, names: Sequence[str], outs: Sequence[int], inner: int, dtype: torch.dtype, *, split: int | None = 0
    ) -> Matrix:
        """One matrix of the weights [out, inner] of several projections, each split among the ranks.

        One name with several `outs` is a projection that the checkpoint has fused already.
        """
        if len(names) == 1:
            pieces = torch.split(self._mapped(names[0], (sum(outs), inner)), list(outs))
        else:
            pieces = tuple(self._mapped(name, (out, inner)) for name, out in zip(names, outs, strict=True))
        if split is not None:
            pieces = tuple(self.group.part.of(piece, split) for piece in pieces)
        # One piece needs no copy here: every form makes its own.
        whole = pieces[0].to(dtype) if len(pieces) == 1 else torch.cat([piece.to(dtype) for piece in pieces])
        return self.form(whole)

    def _mapped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it stands in the file, without a copy where the file has plain numbers."""
        if name not in self._readers:
            raise SettingsError([("model", f"{self.path} has no tensor {name!r}")])
        tensor = self._readers[name]()
        if tuple(tensor.shape) != shape:
            raise SettingsError([("model", f"tensor {name!r} of {self.path} is {tuple(tensor.shape)}, not {shape}")])
        self._read += 1
        self._tell(min(1.0, self._read / len(self._readers)))
        return tensor

    def _tell(self, done: float) -> None:
        now = time.monotonic()
        if done == 1.0 or done >= self._reported + _REPORT_SHARE or now >= self._reported_at + _REPORT_SECONDS:
            self._reported, self._reported_at = done, now
            self._report(done)

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.clear()
        self._open.clear()  # safe_open unmaps its file when it is dropped


def _gguf_tensor(file: gguf_file.GgufFile, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf_file.hf_tensor(file, name))
