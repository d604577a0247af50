"""Lists that a read empties, in TensorRT-LLM's format: GET /metrics, GET /perf_metrics, POST /kv_cache_events.

Each record is given to one reader only: poll from a single client. Of very many that nobody reads, the newest are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import msgspec

from engine.feeds import MAX_RECORDS
from openai_api.engine_port import Engine

logger = logging.getLogger(__name__)

SETTINGS = {
    "iterations": "enable_iter_perf_stats",
    "requests": "return_perf_metrics",
    "cache_events": "kv_cache_config.event_buffer_max_size",
}
"""What has the engine keep each list."""


class DrainedLists:
    def __init__(self, engine: Engine, kept: Collection[str] = tuple(SETTINGS)) -> None:
        """`kept` are the lists whose setting is on; the others are always empty."""
        self._engine = engine
        self._unexplained = set(SETTINGS) - set(kept)
        self._arrivals: OrderedDict[str, float] = OrderedDict()  # of requests at this server, by their ids

    def arrived(self, request_id: str, at: float) -> None:
        self._arrivals[request_id] = at
        if len(self._arrivals) > MAX_RECORDS:
            self._arrivals.popitem(last=False)

    def iterations(self) -> bytes:
        """Empty unless `enable_iter_perf_stats` is on."""
        return _list(self._drain("iterations"))

    def cache_events(self) -> bytes:
        """Empty unless `kv_cache_config.event_buffer_max_size` is above 0."""
        return _list(self._drain("cache_events"))

    def requests(self, clock_offset: float) -> bytes:
        """Empty unless `return_perf_metrics` is on. Times are on the clock of whoever set the offset."""
        return _list([self._timed(record, clock_offset) for record in self._drain("requests")])

    def _drain(self, name: str) -> list[bytes]:
        if name in self._unexplained:
            self._unexplained.remove(name)
            logger.warning("the list of %s was read, and is always empty: %s is off", name, SETTINGS[name])
        return self._engine.feeds.drain(name)

    def _timed(self, encoded: bytes, offset: float) -> bytes:
        record: dict[str, Any] = msgspec.json.decode(encoded)
        times = record["perf_metrics"]["timing_metrics"]
        arrival = self._arrivals.pop(record["request_id"], None)
        if arrival is not None:
            times["server_arrival_time"] = arrival
        for name in times:
            if name != "kv_cache_size":
                times[name] += offset
        return msgspec.json.encode(record)


def _list(records: list[bytes]) -> bytes:
    return b"[" + b",".join(records) + b"]"
