"""What a store client did during one life of its agent: counted by the engine's threads, kept in the segment record."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from mooncake_pool.segments import Activity, Traffic


class ActivityLog:
    """Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._put_to: dict[str, Traffic] = {}
        self._got_from: dict[str, Traffic] = {}

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def put(self, endpoints: Iterable[str], block_bytes: int) -> None:
        """One block was stored at each of the endpoints."""
        with self._lock:
            _add(self._put_to, endpoints, block_bytes)

    def got(self, endpoints: Iterable[str], block_bytes: int) -> None:
        with self._lock:
            _add(self._got_from, endpoints, block_bytes)

    def snapshot(self) -> Activity:
        with self._lock:
            return Activity(
                dict(self._counts),
                {holder: Traffic(each.blocks, each.bytes) for holder, each in self._put_to.items()},
                {holder: Traffic(each.blocks, each.bytes) for holder, each in self._got_from.items()},
            )


def _add(table: dict[str, Traffic], endpoints: Iterable[str], block_bytes: int) -> None:
    for endpoint, blocks in Counter(endpoints).items():
        traffic = table.setdefault(endpoint, Traffic())
        traffic.blocks += blocks
        traffic.bytes += blocks * block_bytes
