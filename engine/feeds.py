"""Records that wait in the HTTP process until somebody reads them."""

from __future__ import annotations

from collections import Counter, deque

from engine.messages import Feed

MAX_RECORDS = 10_000
"""Of each feed: nobody may ever read one."""


class Feeds:
    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._records: dict[str, deque[bytes]] = {}
        self.dropped: Counter[str] = Counter()  # records that nobody read in time, by feed

    def take(self, feed: Feed) -> None:
        records = self._records.setdefault(feed.name, deque(maxlen=self._limit))
        if (over := len(records) + len(feed.items) - self._limit) > 0:
            self.dropped[feed.name] += over
        records.extend(feed.items)

    def drain(self, name: str) -> list[bytes]:
        """Each record once, oldest first."""
        return list(self._records.pop(name, ()))
