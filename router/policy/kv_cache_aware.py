"""Cached prefix against load: score = matched blocks - load_weight x active requests; the highest wins.

With the default weight of 0.25, four active requests cost as much as one block of match. Workers at
`load_cap x max_batch_size` or more are passed over, unless all are. Ties go to the least recently used.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.config import RouterConfig
from router.index import BlockIndex
from router.policy.base import Need, PrefixAware, matched_blocks
from router.worker import Worker


class KvCacheAware(PrefixAware):
    name = "kv_cache_aware"

    def __init__(self, config: RouterConfig, index: BlockIndex) -> None:
        super().__init__(index)
        self._config = config
        self.track_routed_blocks = config.track_routed_blocks

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        matched = self._matched(need)
        candidates = self._shortlist(candidates, matched)
        limit = self._config.load_cap * self._config.max_batch_size
        open_ones = [worker for worker in candidates if worker.active < limit] or candidates
        weight = self._config.load_weight

        def rank(worker: Worker) -> tuple[float, int]:
            return matched_blocks(worker, matched) - weight * worker.active, -worker.last_picked

        best = max(open_ones, key=rank)
        self.affinity_decisions += matched_blocks(best, matched) > 0
        return best

    def served(self, worker: Worker, need: Need, cached_tokens: int | None) -> None:
        self.routed(worker, need)

    def routed(self, worker: Worker, need: Need) -> None:
        """The worker now has these blocks: count on them before its events say so.

        Only for workers whose events would also take them back.
        """
        if self.track_routed_blocks and worker.blocks is not None and worker.blocks.expected is not None:
            self._index.predict(worker.blocks, need.keys)

    def scores(self, candidates: Sequence[Worker], need: Need) -> list[dict[str, float]]:
        matched, weight = self._matched(need), self._config.load_weight
        return [
            {
                "score": matched_blocks(worker, matched) - weight * worker.active,
                "matched_blocks": matched_blocks(worker, matched),
                "active_requests": worker.active,
            }
            for worker in candidates
        ]

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "load_weight": self._config.load_weight,
            "track_routed_blocks": self.track_routed_blocks,
        }
