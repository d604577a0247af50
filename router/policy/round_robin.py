"""In turn, whatever the load."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Need, Policy
from router.worker import Worker


class RoundRobin(Policy):
    name = "round_robin"

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        return candidates[self.decisions % len(candidates)]
