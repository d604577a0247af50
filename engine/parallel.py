"""Tensor parallelism as a model sees it: which part of the weights it has, and what it exchanges with the others."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Part `rank` of `ranks` equal ones."""

    rank: int = 0
    ranks: int = 1

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This part along `dim`, as a view. The size must divide."""
        if self.ranks == 1:
            return tensor
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)


WHOLE = Part()


class Group(Protocol):
    """The ranks of one model."""

    part: Part

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, on every rank; may overwrite x."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's columns [T, n] side by side [T, n * ranks] on rank 0; of no use on the others."""

    def wait(self) -> None:
        """Until every rank is here."""


class Alone:
    """The group of a model that is in one piece."""

    part = WHOLE

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def wait(self) -> None:
        pass
