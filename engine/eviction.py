"""In which order cached blocks are given up: lowest retention priority first, then least recently used."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
"""Retention priorities of KV blocks, TensorRT-LLM's: a block of a higher one outlives all of lower ones."""


class EvictionQueue:
    """Numbers with a priority each. The one that was added last is the most recently used of its priority."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {}
        self._priority: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, item: int) -> bool:
        return item in self._priority

    def add(self, item: int, priority: int) -> None:
        self._priority[item] = priority
        self._levels.setdefault(priority, OrderedDict())[item] = None

    def remove(self, item: int) -> None:
        """KeyError if it is not there."""
        priority = self._priority.pop(item)
        level = self._levels[priority]
        del level[item]
        if not level:
            del self._levels[priority]

    def first(self) -> int:
        """The next to be given up. ValueError when empty."""
        return next(iter(self._levels[min(self._levels)]))

    def pop(self) -> int:
        item = self.first()
        self.remove(item)
        return item


class Expiries:
    """Blocks whose priority holds for a limited time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def add(self, block: int, key: bytes, seconds: float) -> None:
        heapq.heappush(self._heap, (self._clock() + seconds, next(self._numbers), block, key))

    def due(self) -> list[tuple[int, bytes]]:
        """(block, the key that it had) of those whose time is over, each once."""
        if not self._heap:
            return []
        now = self._clock()
        over = []
        while self._heap and self._heap[0][0] <= now:
            _, _, block, key = heapq.heappop(self._heap)
            over.append((block, key))
        return over
