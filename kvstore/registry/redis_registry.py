"""Membership in Redis or Valkey.

    /trtllm-disagg/{cluster}/workers/{worker_id}   the record, with a time to live
    /trtllm-disagg/{cluster}/index                 set of worker ids: finds the records without walking the database
    /trtllm-disagg/{cluster}/epoch                 random text, written by who finds none: another one = data was lost
    /trtllm-disagg/{cluster}/changes               channel: "+worker_id", "-worker_id" (left by itself)

Writers that only know the records are found too, a little later: each look takes one bounded step of a SCAN through the
database and adds what it finds to the index.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.protocol import WorkerRecord, worker_key_prefix
from kvstore.registry.address import redacted
from kvstore.registry.embedded import EmbeddedValkey
from kvstore.registry.membership import Membership, RecordReader, View
from kvstore.registry.records import encode_record, record_key
from kvstore.registry.registration import RegistryUnavailable

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Show = Callable[[list[WorkerRecord]], None]

_ANSWER_TIMEOUT = 1.0  # seconds, for a connection and for each command
_POLL_INTERVAL = 0.5  # seconds between looks when no message comes: how late an expiry may be seen
_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0  # seconds
_SCAN_STEP = 500  # keys of the database visited by one look
_NOT_READ = "down: not read yet"
_FAILURES = (redis.RedisError, OSError)

# Removes an id from the index unless its record came back in between.
_PRUNE = "if redis.call('EXISTS', KEYS[2]) == 0 then return redis.call('SREM', KEYS[1], ARGV[1]) end return 0"

_CONNECTION: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": True,
    "encoding_errors": "replace",  # a record of foreign bytes is refused by its decoder, not by the connection
    "socket_timeout": _ANSWER_TIMEOUT,
    "socket_connect_timeout": _ANSWER_TIMEOUT,
}


def _cluster_prefix(cluster_name: str) -> str:
    return worker_key_prefix(cluster_name).removesuffix("workers/")


class RedisRecordWriter:
    def __init__(self, url: str, cluster_name: str, record: WorkerRecord, ttl: float) -> None:
        prefix = _cluster_prefix(cluster_name)
        self._index, self._channel = prefix + "index", prefix + "changes"
        self._id = record.worker_id
        self._key, self._value = record_key(cluster_name, record.worker_id), encode_record(record)
        self._ttl_ms = math.ceil(1000 * ttl)
        self._client: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_CONNECTION)

    def write(self) -> None:
        with self._client.pipeline() as pipe:
            pipe.set(self._key, self._value, px=self._ttl_ms)
            pipe.sadd(self._index, self._id)
            pipe.publish(self._channel, "+" + self._id)
            _answer(pipe.execute)

    def refresh(self) -> bool:
        return bool(_answer(lambda: self._client.pexpire(self._key, self._ttl_ms)))

    def remove(self) -> None:
        with self._client.pipeline() as pipe:
            pipe.delete(self._key)
            pipe.srem(self._index, self._id)
            pipe.publish(self._channel, "-" + self._id)
            _answer(pipe.execute)

    def close(self) -> None:
        self._client.close()


def _answer(command: Callable[[], _T]) -> _T:
    try:
        return command()
    except _FAILURES as error:
        raise RegistryUnavailable(str(error) or type(error).__name__) from error


class RedisMembership(Membership):
    """Each watch has a thread with a client of its own, which asks and waits; the event loop only gets the results.

    `owned`: a Valkey that ends with this.
    """

    def __init__(self, url: str, cluster_name: str, grace: float, owned: EmbeddedValkey | None = None) -> None:
        self.uri = redacted(url)
        self.state = _NOT_READ
        self._owned = owned
        self._closed = False
        self._open_observer: Callable[[_Show], _Observer] = lambda show: _Observer(
            url, cluster_name, View(grace), show, self._became
        )
        self._observer: _Observer | None = None
        self._changed = asyncio.Event()
        self._latest: list[WorkerRecord] = []

    def __repr__(self) -> str:
        return f"<RedisMembership {self.uri} {self.state} workers={len(self._latest)}>"

    async def watch(self) -> AsyncIterator[list[WorkerRecord]]:
        loop = asyncio.get_running_loop()

        def show(records: list[WorkerRecord]) -> None:
            self._latest = records
            try:
                loop.call_soon_threadsafe(self._changed.set)
            except RuntimeError:
                pass  # the loop has ended, and with it the interest

        observer = self._observer = self._open_observer(show)
        observer.start()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._closed:
                    return
                yield list(self._latest)
        finally:
            observer.ending.set()

    async def aclose(self) -> None:
        self._closed = True
        self._changed.set()
        if self._observer is not None:
            self._observer.ending.set()
            await asyncio.to_thread(self._observer.join, _POLL_INTERVAL + 3 * _ANSWER_TIMEOUT)
        if self._owned is not None:
            await asyncio.to_thread(self._owned.stop)

    def _became(self, state: str) -> None:
        before, self.state = self.state, state
        if state == "up" != before:
            logger.info("registry: %s answers", self.uri)
        elif state != "up" and before in ("up", _NOT_READ):
            logger.error("registry: %s is %s; the last view of the workers stands", self.uri, state)


class _Observer(threading.Thread):
    """Looks at the registry whenever a message comes, and twice a second for expiries; shows each changed view."""

    def __init__(
        self,
        url: str,
        cluster_name: str,
        view: View,
        show: _Show,
        became: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"registry watch {cluster_name}", daemon=True)
        self.ending = threading.Event()
        self._uri = redacted(url)
        self._records = worker_key_prefix(cluster_name)
        prefix = _cluster_prefix(cluster_name)
        self._index, self._epoch_key, self._channel = prefix + "index", prefix + "epoch", prefix + "changes"
        self._client: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_CONNECTION)
        self._messages: Any = None  # redis' PubSub, which has no usable types
        self._epoch: str | None = None
        self._was_down = False
        self._cursor = 0
        self._view = view
        self._show = show
        self._became = became
        self._reader = RecordReader()

    def run(self) -> None:
        shown: list[WorkerRecord] | None = None
        retry = _FIRST_RETRY
        while not self.ending.is_set():
            try:
                self._next_change()
                records = self._look()
            except _FAILURES as error:
                self._unsubscribe()
                self._was_down = True
                self._became(f"down: {error or type(error).__name__}")
                self.ending.wait(retry)
                retry = min(2 * retry, _LAST_RETRY)
                continue
            self._was_down, retry = False, _FIRST_RETRY
            self._became("up")
            if records != shown:
                shown = records
                self._show(records)
        self._unsubscribe()
        self._client.close()

    def _next_change(self) -> None:
        """Returns at a message, having read all that wait, or when it is time to look for expiries; at once after it
        had to subscribe, since a change before that brought no message."""
        if self._messages is None:
            self._messages = self._client.pubsub(ignore_subscribe_messages=True)
            self._messages.subscribe(self._channel)
            return
        timeout = _POLL_INTERVAL
        while (message := self._messages.get_message(timeout=timeout)) is not None:
            text = str(message["data"])
            if text.startswith("-"):
                self._view.left(text[1:])
            timeout = 0.0

    def _unsubscribe(self) -> None:
        messages, self._messages = self._messages, None
        if messages is not None:
            messages.close()

    def _look(self) -> list[WorkerRecord]:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._epoch_key, secrets.token_hex(8), nx=True)
            pipe.get(self._epoch_key)
            pipe.smembers(self._index)
            pipe.scan(self._cursor, match=_glob_literal(self._records) + "*", count=_SCAN_STEP)
            _, epoch, indexed, (self._cursor, scanned) = pipe.execute()
        ids = set(indexed) | {key.removeprefix(self._records) for key in scanned}
        values = self._values(sorted(ids))
        self._tidy_index(gone=set(indexed) - values.keys(), foreign=values.keys() - set(indexed))
        if self._epoch is not None and (self._was_down or epoch != self._epoch):
            self._view.hold()
        if self._epoch not in (None, epoch):
            logger.warning("registry: %s lost its data; workers keep their place until they are back", self._uri)
        self._epoch = epoch
        return self._view.merge(self._reader.read({self._records + name: value for name, value in values.items()}))

    def _values(self, ids: list[str]) -> dict[str, str]:
        if not ids:
            return {}
        values: Any = self._client.mget([self._records + worker_id for worker_id in ids])
        return {worker_id: value for worker_id, value in zip(ids, values, strict=True) if value is not None}

    def _tidy_index(self, gone: set[str], foreign: set[str]) -> None:
        if not gone and not foreign:
            return
        with self._client.pipeline(transaction=False) as pipe:
            for worker_id in gone:
                pipe.eval(_PRUNE, 2, self._index, self._records + worker_id, worker_id)
            if foreign:
                pipe.sadd(self._index, *foreign)
            pipe.execute()


def _glob_literal(text: str) -> str:
    return re.sub(r"([*?\[\]^\\])", r"\\\1", text)
