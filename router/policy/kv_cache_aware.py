"""Cached prefix against load: score = matched blocks - load_weight x active requests; the highest wins.

With the default weight of 0.25, four active requests cost as much as one block of match. Workers at
`load_cap x max_batch_size` or more are passed over, unless all are. Ties go to the least recently used.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.config import RouterConfig
from router.index import BlockIndex
from router.policy.base import Need, Policy
from router.worker import Worker


class KvCacheAware(Policy):
    name = "kv_cache_aware"
    needs_tokens = True
    needs_keys = True

    def __init__(self, config: RouterConfig, index: BlockIndex) -> None:
        super().__init__()
        self._config = config
        self._index = index
        self.track_routed_blocks = config.track_routed_blocks
        self.affinity_decisions = 0  # the chosen worker held a part of the prompt

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        matched = self._matched(need)
        limit = self._config.load_cap * self._config.max_batch_size
        open_ones = [worker for worker in candidates if worker.active < limit] or candidates
        weight = self._config.load_weight

        def rank(worker: Worker) -> tuple[float, int]:
            return matched_blocks(worker, matched) - weight * worker.active, -worker.last_picked

        best = max(open_ones, key=rank)
        self.affinity_decisions += matched_blocks(best, matched) > 0
        return best

    def predicted_blocks(self, worker: Worker, need: Need) -> int:
        """Leading blocks of the prompt that the index says `worker` holds."""
        return matched_blocks(worker, self._matched(need))

    def _matched(self, need: Need) -> dict[int, int]:
        if need.matched is None:
            need.matched = self._index.match(need.keys)
        return need.matched

    def routed(self, worker: Worker, need: Need) -> None:
        """The worker now computes these blocks: count on them before its events say so.

        Only for workers whose events would also take them back.
        """
        if self.track_routed_blocks and worker.blocks is not None and worker.blocks.expected is not None:
            self._index.add(worker.blocks, need.keys)

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "affinity_decisions": self.affinity_decisions,
            "load_weight": self._config.load_weight,
            "track_routed_blocks": self.track_routed_blocks,
        }


def matched_blocks(worker: Worker, matched: dict[int, int]) -> int:
    return 0 if worker.blocks is None else matched.get(worker.blocks.bit, 0)
