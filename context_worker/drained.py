"""Lists that a read empties, in TensorRT-LLM's format: GET /metrics, GET /perf_metrics, POST /kv_cache_events.

Each record is given to one reader only: poll from a single client.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from engine.feeds import MAX_RECORDS
from openai_api.engine_port import Engine


class DrainedLists:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arrivals: OrderedDict[str, float] = OrderedDict()  # of requests at this server, by their ids

    def arrived(self, request_id: str, at: float) -> None:
        self._arrivals[request_id] = at
        if len(self._arrivals) > MAX_RECORDS:
            self._arrivals.popitem(last=False)

    def iterations(self) -> bytes:
        """Empty unless `enable_iter_perf_stats` is on."""
        return _list(self._engine.drain("iterations"))

    def cache_events(self) -> bytes:
        """Empty unless `kv_cache_config.event_buffer_max_size` is above 0."""
        return _list(self._engine.drain("cache_events"))

    def requests(self, clock_offset: float) -> bytes:
        """Empty unless `return_perf_metrics` is on. Times are on the clock of whoever set the offset."""
        return _list([self._timed(record, clock_offset) for record in self._engine.drain("requests")])

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
