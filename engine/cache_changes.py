"""Changes of the prefix cache, for readers outside: our own events, and logs in other makes' formats."""

from __future__ import annotations

from typing import Protocol

from engine.host_tier import Content
from kvstore.protocol import KvEvent


class CacheLog(Protocol):
    """Told of every change, in order. Level 0 is the KV pool, 1 is host memory."""

    def stored(self, content: Content) -> None: ...

    def removed(self, content: Content) -> None: ...

    def moved(self, content: Content, level: int) -> None: ...

    def reprioritised(self, content: Content, old: int) -> None: ...


class CacheChanges:
    """Collects changes as events, consecutive ones of a kind in one."""

    def __init__(self) -> None:
        self.logs: list[CacheLog] = []
        self._events: list[KvEvent] = []

    def drain(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, content: Content) -> None:
        last = self._events[-1] if self._events else None
        if last is None or last.removed or last.moved:
            last = KvEvent(stored=[])
            self._events.append(last)
        last.stored.append(content.key)
        for log in self.logs:
            log.stored(content)

    def removed(self, content: Content) -> None:
        last = self._events[-1] if self._events else None
        if last is None or not last.removed:
            last = KvEvent(removed=[])
            self._events.append(last)
        last.removed.append(content.key)
        for log in self.logs:
            log.removed(content)

    def moved(self, content: Content, level: int) -> None:
        last = self._events[-1] if self._events else None
        if last is None or not last.moved or last.level != level:
            last = KvEvent(moved=[], level=level)
            self._events.append(last)
        last.moved.append(content.key)
        for log in self.logs:
            log.moved(content, level)

    def reprioritised(self, content: Content, old: int) -> None:
        for log in self.logs:
            log.reprioritised(content, old)
