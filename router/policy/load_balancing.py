"""Fewest active requests, or prompt tokens, first; ties to the least recently used.

Of very many workers a part is looked at, the next ones at each decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import MANY, Need, Policy
from router.worker import Worker


class LoadBalancing(Policy):
    name = "load_balancing"

    def __init__(self, use_tokens: bool = False) -> None:
        super().__init__()
        self.needs_tokens = use_tokens

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        if len(candidates) > MANY:
            candidates = self._window(candidates)
        if self.needs_tokens:
            return min(candidates, key=lambda worker: (worker.active_tokens, worker.last_picked))
        return min(candidates, key=lambda worker: (worker.active, worker.last_picked))

    def describe(self) -> dict[str, object]:
        return super().describe() | {"use_tokens": self.needs_tokens}
