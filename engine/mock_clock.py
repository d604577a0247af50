"""The time of mock engines: the real one, or one that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def time(self) -> float:
        """Seconds."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer: ...


class RealClock:
    """Of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_later(seconds, callback) if seconds > 0 else self._loop.call_soon(callback)


class _Alarm:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Stands still until it is moved. An hour of a hundred engines passes as fast as they can be computed."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._alarms: list[tuple[float, int, _Alarm]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        alarm = _Alarm(callback)
        heapq.heappush(self._alarms, (self._now + max(0.0, seconds), next(self._numbers), alarm))
        return alarm

    async def run(self, seconds: float, patience: int = 20) -> None:
        """Let that much time pass. Between two moments, tasks have `patience` turns of the event loop to react."""
        end = self._now + seconds
        await self._settle(patience)
        while self._alarms and self._alarms[0][0] <= end:
            self._next()
            await self._settle(patience)
        self._now = end

    async def run_until(self, done: Callable[[], object], limit: float = 3600.0, patience: int = 20) -> float:
        """Until `done()`; returns the seconds that have passed. TimeoutError after `limit` of them, or when nothing is
        left to happen."""
        start = self._now
        await self._settle(patience)
        while not done():
            if not self._alarms or self._alarms[0][0] > start + limit:
                raise TimeoutError(f"not done after {self._now - start:g} s")
            self._next()
            await self._settle(patience)
        return self._now - start

    def _next(self) -> None:
        self._now, _, alarm = heapq.heappop(self._alarms)
        if alarm.callback is not None:
            alarm.callback()

    async def _settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
