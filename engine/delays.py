"""The test seam that makes stages of the engine slow, to put a cancel or a crash inside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STAGES = ("step", "prefill_chunk", "fetch", "publish")


class Delays:
    """Seconds to wait by stage; without fault injection all are zero for ever. Safe to use from several threads."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._seconds: dict[str, float] = {}
        self._changed = threading.Condition()

    def set(self, seconds: dict[str, float]) -> None:
        """Replaces all delays, those being waited for included."""
        if self._enabled:
            with self._changed:
                self._seconds = dict(seconds)
                self._changed.notify_all()

    def of(self, stage: str) -> float:
        return self._seconds.get(stage, 0.0)

    def wake(self) -> None:
        """Have all waiters look at their `given_up` again."""
        if self._enabled:
            with self._changed:
                self._changed.notify_all()

    def wait(self, stage: str, given_up: Callable[[], bool]) -> None:
        if not self._seconds:
            return
        start = time.monotonic()
        with self._changed:
            while (left := start + self.of(stage) - time.monotonic()) > 0 and not given_up():
                self._changed.wait(left)
