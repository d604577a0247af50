"""A mixture of experts: each row goes through the few feed-forward blocks that a router chooses for it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from engine.models.llama_shape import ExpertShape
from engine.models.matrix import Matrix, multiply


@dataclasses.dataclass(slots=True)
class Expert:
    gate_up: Matrix  # [hidden, 2 intermediate]
    down: Matrix  # [intermediate, hidden]


@dataclasses.dataclass(slots=True)
class Experts:
    shape: ExpertShape
    router: torch.Tensor  # [hidden, experts]
    blocks: list[Expert]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, hidden] to the weighted sum of their experts' results.

        Experts are taken in the order of their numbers, so that a row's sum does not depend on the rows beside it.
        """
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            gate, up = multiply(x[rows], self.blocks[number].gate_up).chunk(2, -1)
            result = multiply(F.silu(gate) * up, self.blocks[number].down)
            out.index_add_(0, rows, result * weights[rows, places, None])
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers [T, per_token] of each row's experts."""
        shares = torch.softmax(x @ self.router, -1, dtype=torch.float32)
        weights, chosen = shares.topk(self.shape.per_token, -1)
        if self.shape.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen
