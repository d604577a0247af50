"""What the KV plane keeps in Redis beside the workers' records: hand-off leases and KV event streams.

    /trtllm-disagg/{cluster}/kv/index                   set of "worker_id incarnation"
    /trtllm-disagg/{cluster}/kv/events/{incarnation}    stream of KvEventBatch (field "b", msgpack), capped, with a TTL
    /trtllm-disagg/{cluster}/kv/leases/{incarnation}    hash: hand-off id → Lease (JSON), with a TTL

All of it is a copy: the worker's memory is the truth. A reader that misses a number asks the worker for a snapshot
(GET /kv_events/stream begins with one). A writer that cannot reach Redis drops what it has, says so, and begins again
with a snapshot when Redis is back.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.protocol import KvEvent, KvEventBatch
from kvstore.registry.address import redacted

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 1.0  # seconds
_RETRY = 0.5
_MAX_WAITING = 20_000  # operations that wait for Redis; beyond, they are dropped
_BATCH = 256
_FAILURES = (redis.RedisError, OSError)
STREAM_LENGTH = 10_000  # batches that a stream keeps at least


class Lease(msgspec.Struct, frozen=True):
    """Pages that a context worker holds for a reader."""

    endpoint: str  # of the holder
    blocks: int
    until: float  # seconds since the epoch


def _prefix(cluster: str) -> str:
    return f"/trtllm-disagg/{cluster}/kv/"


def _connect(url: str) -> Any:
    return redis.Redis.from_url(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=_ANSWER_TIMEOUT,
        socket_connect_timeout=_ANSWER_TIMEOUT,
    )


class KvPlaneWriter:
    """One worker's side, on a thread of its own; every method returns at once.

    `ttl`: seconds that the keys outlive the writer. `resnapshot()` is called on the writer's thread when events were
    lost: the caller is to publish a snapshot (an event with `cleared`) as the next one.
    """

    def __init__(
        self, url: str, cluster: str, worker_id: str, incarnation: str, ttl: float, resnapshot: Callable[[], None]
    ) -> None:
        prefix = _prefix(cluster)
        self._uri = redacted(url)
        self._index = prefix + "index"
        self._member = f"{worker_id} {incarnation}"
        self._stream = f"{prefix}events/{incarnation}"
        self._leases = f"{prefix}leases/{incarnation}"
        self._incarnation = incarnation
        self._ttl_ms = math.ceil(1000 * ttl)
        self._beat = ttl / 3
        self._client = _connect(url)
        self._resnapshot = resnapshot
        self._operations: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_MAX_WAITING)
        self._seq = 0
        self._lossy = False  # events are dropped until a snapshot comes
        self._lock = threading.Lock()
        self.state = "starting"
        self.dropped = 0
        self._thread = threading.Thread(target=self._serve, name="kv plane", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"KvPlaneWriter({self._uri}, {self.state}, next {self._seq}, dropped {self.dropped})"

    def publish(self, events: Sequence[KvEvent]) -> None:
        with self._lock:
            if self._lossy and not any(event.cleared for event in events):
                self.dropped += 1
                return
            self._lossy = False
            batch = KvEventBatch(self._incarnation, self._seq, list(events))
            self._seq += 1
        payload = msgspec.msgpack.encode(batch)
        self._put(lambda pipe: pipe.xadd(self._stream, {"b": payload}, maxlen=STREAM_LENGTH, approximate=True))

    def lease_opened(self, handoff_id: int, lease: Lease) -> None:
        value = msgspec.json.encode(lease)
        self._put(lambda pipe: pipe.hset(self._leases, str(handoff_id), value))

    def lease_closed(self, handoff_id: int) -> None:
        self._put(lambda pipe: pipe.hdel(self._leases, str(handoff_id)))

    def close(self, timeout: float = 3.0) -> None:
        """Removes what was written; without Redis, the TTL does."""
        try:
            self._operations.put(None, timeout=timeout)
        except queue.Full:
            pass
        self._thread.join(timeout)

    def _put(self, operation: Callable[[Any], None]) -> None:
        try:
            self._operations.put_nowait(operation)
        except queue.Full:
            self._lose(1)

    def _lose(self, count: int) -> None:
        with self._lock:
            self.dropped += count
            self._lossy = True

    # ------------------------------------------------------------ thread

    def _serve(self) -> None:
        batch: list[Callable[[Any], None]] = []
        last = 0.0
        while True:
            ended = self._collect(batch, max(0.0, last + self._beat - time.monotonic()))
            try:
                if ended:
                    self._erase(batch)
                    return
                self._send(batch)
                last = time.monotonic()
            except _FAILURES as error:
                if ended:
                    return
                self._became(f"degraded: {error or type(error).__name__}")
                self._lose(len(batch))
                time.sleep(_RETRY)
            batch.clear()

    def _collect(self, batch: list[Callable[[Any], None]], wait: float) -> bool:
        """Operations that are there, or nothing after `wait` seconds. True at the end."""
        try:
            item = self._operations.get(timeout=wait)
            while item is not None:
                batch.append(item)
                if len(batch) >= _BATCH:
                    return False
                item = self._operations.get_nowait()
        except queue.Empty:
            return False
        return True

    def _send(self, batch: Sequence[Callable[[Any], None]]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for operation in batch:
                operation(pipe)
            pipe.sadd(self._index, self._member)
            pipe.pexpire(self._stream, self._ttl_ms)
            pipe.pexpire(self._leases, self._ttl_ms)
            present = pipe.execute()
        known = not present[-3]  # SADD of a member that was there
        if self.state != "up":
            first = self.state == "starting"
            self._became("up")
            known = known or first
        if not known or self._lossy:
            # Redis came back empty, or events were lost: begin again.
            with self._lock:
                self._lossy = True
            self._resnapshot()

    def _erase(self, batch: Sequence[Callable[[Any], None]]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.srem(self._index, self._member)
            pipe.delete(self._stream, self._leases)
            pipe.execute()
        self._client.close()

    def _became(self, state: str) -> None:
        before, self.state = self.state, state
        if state == "up" and before != "starting":
            log.warning("KV plane: %s answers again; %d updates were dropped meanwhile", self._uri, self.dropped)
        elif state != "up" and before in ("up", "starting"):
            log.error("KV plane: %s is %s; events and leases are not published", self._uri, state)


class Gap(msgspec.Struct, frozen=True):
    """Events of this worker were missed, or it is gone (`gone`): forget it, or ask it for a snapshot."""

    worker_id: str
    incarnation: str
    gone: bool = False


class KvPlaneReader:
    """All workers' event streams. Blocking; for a thread of its own. Raises redis.RedisError and OSError."""

    def __init__(self, url: str, cluster: str) -> None:
        self._prefix = _prefix(cluster)
        self._client = _connect(url)
        self._workers: dict[str, str] = {}  # incarnation: worker_id
        self._positions: dict[str, bytes] = {}  # incarnation: last entry id read
        self._expected: dict[str, int | None] = {}  # incarnation: next number; None before the first snapshot

    def poll(self, wait: float = 0.5) -> list[tuple[str, KvEventBatch] | Gap]:
        """(worker_id, batch) in each worker's order, and gaps, after at most `wait` seconds."""
        found: list[tuple[str, KvEventBatch] | Gap] = list(self._look_for_workers())
        streams = {self._stream(name): position for name, position in self._positions.items()}
        if not streams:
            time.sleep(wait)
            return found
        milliseconds = max(1, min(round(1000 * wait), int(500 * _ANSWER_TIMEOUT)))
        for key, entries in self._client.xread(streams, count=1000, block=milliseconds) or []:
            incarnation = key.decode().rpartition("/")[2]
            for position, fields in entries:
                self._positions[incarnation] = position
                found += self._take(incarnation, msgspec.msgpack.decode(fields[b"b"], type=KvEventBatch))
        return found

    def leases(self) -> dict[str, dict[int, Lease]]:
        """By incarnation and hand-off id; those that have run out are left out."""
        self._look_for_workers()
        now = time.time()
        found: dict[str, dict[int, Lease]] = {}
        for incarnation in self._workers:
            values = self._client.hgetall(f"{self._prefix}leases/{incarnation}")
            leases = {int(key): msgspec.json.decode(value, type=Lease) for key, value in values.items()}
            found[incarnation] = {key: lease for key, lease in leases.items() if lease.until > now}
        return found

    def close(self) -> None:
        self._client.close()

    def _stream(self, incarnation: str) -> str:
        return f"{self._prefix}events/{incarnation}"

    def _look_for_workers(self) -> list[Gap]:
        """A member whose stream has run out is dead: its writer would have kept it."""
        members = [member.decode().split(" ", 1) for member in self._client.smembers(self._prefix + "index")]
        present = {incarnation: worker_id for worker_id, incarnation in members}
        alive = {name for name in present if self._client.exists(self._stream(name))}
        gaps = [Gap(self._workers[name], name, gone=True) for name in self._workers if name not in alive]
        for gap in gaps:
            for table in (self._workers, self._positions, self._expected):
                table.pop(gap.incarnation, None)
        for name in alive - self._workers.keys():
            self._workers[name] = present[name]
            self._positions[name] = b"0-0"
            self._expected[name] = None
        return gaps

    def _take(self, incarnation: str, batch: KvEventBatch) -> list[tuple[str, KvEventBatch] | Gap]:
        worker_id = self._workers[incarnation]
        expected = self._expected[incarnation]
        snapshot = any(event.cleared for event in batch.events)
        self._expected[incarnation] = batch.seq + 1
        if snapshot or batch.seq == expected:
            return [(worker_id, batch)]
        if expected is not None and batch.seq < expected:
            self._expected[incarnation] = expected
            return []  # seen before
        return [Gap(worker_id, incarnation), (worker_id, batch)]
