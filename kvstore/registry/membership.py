"""The router's view of a cluster's workers."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from kvstore.protocol import WorkerRecord
from kvstore.registry.records import decode_record, newest_per_address

logger = logging.getLogger(__name__)


class Membership(abc.ABC):
    """`state` is "up" or "down: <reason>" as of the last look; `uri` the registry's address, passwords hidden."""

    uri: str
    state: str = "up"

    @abc.abstractmethod
    def watch(self) -> AsyncIterator[list[WorkerRecord]]:
        """The full list, sorted by worker id: once the registry has been read, then after each change. One watcher.

        A registry that is down raises nothing: the last list stands, and watching goes on when it is back.
        Ends after `aclose()`, and may be cancelled.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Idempotent."""


class View:
    """Which workers count, given what each look at the registry found. Pure; times in seconds of `clock`.

    A worker whose record is gone has left, except while the view is held: after the registry lost its data (restart,
    FLUSHALL) or was away for longer than the records live, an absent record says nothing about its worker.
    """

    def __init__(self, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace = grace
        self._clock = clock
        self._current: dict[str, WorkerRecord] = {}
        self._held: dict[str, WorkerRecord] = {}
        self._held_until = 0.0

    def hold(self) -> None:
        """Keep the present workers for `grace` seconds, or until each is found again."""
        self._held = dict(self._current)
        self._held_until = self._clock() + self._grace

    def left(self, worker_id: str) -> None:
        """The worker said so itself."""
        self._held.pop(worker_id, None)

    def merge(self, found: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        self._current = {record.worker_id: record for record in found}
        for worker_id in self._current:
            self._held.pop(worker_id, None)
        if self._clock() >= self._held_until:
            self._held.clear()
        self._current |= self._held
        return newest_per_address(self._current.values())


class RecordReader:
    """Decodes records; one that cannot be read is skipped, with one warning for as long as it stays the same."""

    def __init__(self) -> None:
        self._refused: dict[str, str | bytes] = {}

    def read(self, values: Mapping[str, str | bytes]) -> list[WorkerRecord]:
        """`values` by full key."""
        records = []
        self._refused = {key: value for key, value in self._refused.items() if key in values}
        for key, value in values.items():
            try:
                records.append(decode_record(key, value))
            except ValueError as error:
                if self._refused.get(key) != value:
                    logger.warning("registry: %s is skipped: %s", key, error)
                    self._refused[key] = value
        return records
