"""Leases and KV event streams in a real Valkey."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.protocol import KvEvent, KvEventBatch
from kvstore.registry import kv_plane
from kvstore.registry.embedded import EmbeddedValkey
from kvstore.registry.kv_plane import Gap, KvPlaneReader, KvPlaneWriter, Lease


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


class Worker:
    """A writer, and the cache that it publishes."""

    def __init__(self, url: str, cluster: str, incarnation: str, ttl: float = 3.0) -> None:
        self.keys: list[bytes] = []
        self.snapshots = 0
        self.writer = KvPlaneWriter(url, cluster, f"id-{incarnation}", incarnation, ttl, self._snapshot)

    def _snapshot(self) -> None:
        self.snapshots += 1
        self.writer.publish([KvEvent(cleared=True, stored=list(self.keys))])

    def store(self, *keys: bytes) -> None:
        self.keys += keys
        self.writer.publish([KvEvent(stored=list(keys))])


def until(reader: KvPlaneReader, enough: Callable[[list[object]], bool], seconds: float = 10.0) -> list[object]:
    seen: list[object] = []
    deadline = time.monotonic() + seconds
    while not enough(seen):
        assert time.monotonic() < deadline, seen
        seen += reader.poll(0.05)
    return seen


def keys_of(seen: list[object]) -> list[bytes]:
    """What a router's index would hold."""
    held: list[bytes] = []
    for item in seen:
        if isinstance(item, tuple):
            batch = item[1]
            assert isinstance(batch, KvEventBatch)
            for event in batch.events:
                if event.cleared:
                    held = []
                held += event.stored
    return held


def test_events_in_order_and_once(valkey: EmbeddedValkey) -> None:
    worker, reader = Worker(valkey.uri, "order", "a"), KvPlaneReader(valkey.uri, "order")
    worker._snapshot()
    for number in range(50):
        worker.store(b"%d" % number)
    seen = until(reader, lambda seen: len(keys_of(seen)) == 50)
    assert keys_of(seen) == worker.keys and not [item for item in seen if isinstance(item, Gap)]
    late = KvPlaneReader(valkey.uri, "order")
    assert keys_of(until(late, lambda seen: len(keys_of(seen)) == 50)) == worker.keys
    worker.writer.close()
    assert until(reader, bool) == [Gap("id-a", "a", gone=True)]


def test_a_trimmed_stream_is_a_gap(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_plane, "STREAM_LENGTH", 10)
    worker, reader = Worker(valkey.uri, "trim", "a"), KvPlaneReader(valkey.uri, "trim")
    worker._snapshot()
    until(reader, bool)
    for number in range(3000):
        worker.store(b"%d" % number)
    deadline = time.monotonic() + 10
    while not worker.writer._operations.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    seen = until(reader, bool)
    assert seen[0] == Gap("id-a", "a")
    worker.writer.close()


def test_a_dead_worker_is_gone_after_its_ttl(valkey: EmbeddedValkey) -> None:
    worker, reader = Worker(valkey.uri, "dead", "a", ttl=0.6), KvPlaneReader(valkey.uri, "dead")
    worker._snapshot()
    until(reader, bool)
    time.sleep(1.0)
    assert until(reader, lambda seen: True) == [], "a live writer keeps its keys"
    worker.writer._send = lambda batch: None  # type: ignore[method-assign] - it no longer reaches Redis
    assert Gap("id-a", "a", gone=True) in until(reader, bool)
    worker.writer.close()


def test_leases(valkey: EmbeddedValkey) -> None:
    worker, reader = Worker(valkey.uri, "lease", "a"), KvPlaneReader(valkey.uri, "lease")
    worker._snapshot()
    open_lease = Lease("127.0.0.1:1", 3, time.time() + 60)
    worker.writer.lease_opened(2**41, open_lease)
    worker.writer.lease_opened(2**41 + 1, Lease("127.0.0.1:1", 3, time.time() - 1))
    worker.writer.lease_opened(2**41 + 2, open_lease)
    worker.writer.lease_closed(2**41 + 2)
    deadline = time.monotonic() + 5
    while reader.leases().get("a") != {2**41: open_lease}:
        assert time.monotonic() < deadline, reader.leases()
    worker.writer.close()
    assert reader.leases() == {}


def test_redis_away_and_back_empty() -> None:
    with EmbeddedValkey() as server:
        worker = Worker(server.uri, "away", "a")
        worker._snapshot()
        reader = KvPlaneReader(server.uri, "away")
        worker.store(b"1")
        until(reader, lambda seen: keys_of(seen) == [b"1"])
        server.stop()
        deadline = time.monotonic() + 10
        while not worker.writer.state.startswith("degraded"):
            worker.store(b"x%d" % len(worker.keys))
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in range(20):
            worker.store(b"y%d" % number)
        assert worker.writer.dropped
        server.start()
        fresh = KvPlaneReader(server.uri, "away")
        seen = until(fresh, lambda seen: bool(keys_of(seen)))
        worker.store(b"last")
        seen += until(fresh, lambda more: b"last" in keys_of(more))
        assert worker.snapshots >= 2 and sorted(set(keys_of(seen))) == sorted(worker.keys)
        worker.writer.close()
