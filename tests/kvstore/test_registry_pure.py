"""Addresses, records, and the view over them: no I/O."""

from __future__ import annotations

import json
import logging
import os
import re

import pytest

from kvstore.errors import SettingsError
from kvstore.protocol import ServerRole, WorkerRecord
from kvstore.registry import (
    Backend,
    decode_record,
    encode_record,
    new_worker_id,
    open_membership,
    parse_cluster_uri,
    record_key,
    register_worker,
)
from kvstore.registry.membership import RecordReader, View
from kvstore.registry.records import newest_per_address

A = WorkerRecord("CONTEXT-h:1-1700000000000-1-000", "h", 1, 0)
B = WorkerRecord("GENERATION-h:2-1700000000000-1-000", "h", 2, 1)


@pytest.mark.parametrize(
    ("text", "backend", "url", "host", "port"),
    [
        ("redis://10.0.0.1:6380/3", Backend.REDIS, "redis://10.0.0.1:6380/3", "10.0.0.1", 6380),
        ("redis://registry", Backend.REDIS, "redis://registry:6379/0", "registry", 6379),
        ("redis://u:p%40ss@h:1", Backend.REDIS, "redis://u:p%40ss@h:1/0", "h", 1),
        ("rediss://:secret@h:1/0", Backend.REDIS, "rediss://:secret@h:1/0", "h", 1),
        ("redis://[::1]:7000/0", Backend.REDIS, "redis://[::1]:7000/0", "::1", 7000),
        ("redis://embedded", Backend.EMBEDDED, "redis://embedded", "127.0.0.1", None),
        ("redis://embedded:7000", Backend.EMBEDDED, "redis://127.0.0.1:7000/0", "127.0.0.1", 7000),
        ("http://router:8000", Backend.HTTP, "http://router:8000", "router", 8000),
        ("https://[::1]:8000/", Backend.HTTP, "https://[::1]:8000", "::1", 8000),
    ],
)
def test_addresses(text: str, backend: Backend, url: str, host: str, port: int | None) -> None:
    address = parse_cluster_uri(text)
    assert (address.backend, address.url, address.host, address.port) == (backend, url, host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:6379",
        "redis://",
        "redis://h:port",
        "redis://h:99999",
        "redis://h:0",
        "redis://h:1/db",
        "redis://[::1",
        "http://router",
        "http://router:8000/path",
        "http://user@router:8000",
        "zookeeper://h:1",
        "unix:///tmp/s",
    ],
)
def test_what_is_no_address_is_refused_with_field_and_choices(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_cluster_uri(text)
    [(field, message)] = caught.value.problems
    assert field == "disagg_cluster.cluster_uri"
    assert "redis://embedded" in message and "http(s)://host:port" in message


def test_etcd_is_known_and_refused() -> None:
    with pytest.raises(SettingsError, match="etcd:// is not in this build"):
        parse_cluster_uri("etcd://h:2379")


def test_passwords_are_not_shown() -> None:
    assert "hunter2" not in str(parse_cluster_uri("redis://u:hunter2@h:1/0"))
    with pytest.raises(SettingsError) as caught:
        parse_cluster_uri("redis://u:hunter2@h:1/nonsense")
    assert "hunter2" not in str(caught.value) and "u:***@h:1" in str(caught.value)


@pytest.mark.parametrize(("interval", "ttl"), [(0, 10), (-1, 10), (10, 10), (11, 10)])
def test_heartbeats_must_fit_into_the_time_to_live(interval: float, ttl: float) -> None:
    with pytest.raises(SettingsError, match=r"heartbeat_interval_sec.*inactive_timeout_sec"):
        register_worker("redis://h:1/0", "c", A, interval, ttl)


def test_a_worker_needs_the_real_address_of_an_embedded_registry() -> None:
    with pytest.raises(SettingsError, match="redis://embedded:PORT"):
        register_worker("redis://embedded", "c", A, 1, 3)


def test_a_router_needs_storage_to_host_it() -> None:
    with pytest.raises(SettingsError, match="storage"):
        open_membership("http://h:1", "c")


def test_worker_ids_follow_upstreams_form() -> None:
    worker_id = new_worker_id(ServerRole.CONTEXT, "10.0.0.1", 8001)
    assert re.fullmatch(rf"CONTEXT-10\.0\.0\.1:8001-\d{{13}}-{os.getpid()}-\d{{3,4}}", worker_id)


def test_records_are_upstreams_bytes() -> None:
    assert record_key("c", A.worker_id) == f"/trtllm-disagg/c/workers/{A.worker_id}"
    assert encode_record(A) == json.dumps({"worker_id": A.worker_id, "host": "h", "port": 1, "role": 0})
    assert decode_record(record_key("c", A.worker_id), encode_record(A)) == A


def test_a_newer_writers_extra_fields_are_ignored() -> None:
    value = json.dumps({"worker_id": "w", "host": "h", "port": 1, "role": 0, "zone": "a"})
    assert decode_record("/trtllm-disagg//workers/w", value).port == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "not a worker record"),
        (b"\xff\xfe", "not a worker record"),
        ("[]", "not a worker record"),
        ('{"worker_id": "w", "host": "h", "port": "1", "role": 0}', "not a worker record"),
        ('{"worker_id": "w", "host": "h", "port": 1}', "not a worker record"),
        ('{"worker_id": "other", "host": "h", "port": 1, "role": 0}', "other"),
        ('{"worker_id": "w", "host": "", "port": 1, "role": 0}', "no address"),
        ('{"worker_id": "w", "host": "h", "port": 0, "role": 0}', "no address"),
        ('{"worker_id": "w", "host": "h", "port": 65536, "role": 0}', "no address"),
        ('{"worker_id": "w", "host": "h", "port": 1, "role": 77}', "role 77"),
    ],
)
def test_unreadable_records_say_why(value: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_record("/trtllm-disagg/c/workers/w", value)


def test_unreadable_records_are_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    reader = RecordReader()
    values = {record_key("c", A.worker_id): encode_record(A), record_key("c", "bad"): "{"}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.read(values) == [A]
    assert [
        record.message for record in caplog.records if "/trtllm-disagg/c/workers/bad" in record.message
    ].__len__() == 1
    with caplog.at_level(logging.WARNING):
        reader.read(values | {record_key("c", "bad"): "{{"})
    assert len(caplog.records) == 2  # another value is another problem


def test_a_restarted_worker_replaces_its_dead_record() -> None:
    newer = WorkerRecord("CONTEXT-h:1-1700000000999-7-000", "h", 1, 0)
    foreign = WorkerRecord("hand-made", "h", 1, 0)
    assert newest_per_address([newer, B, A, foreign]) == [newer, B]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_view_follows_the_records() -> None:
    view = View(10, Clock())
    assert view.merge([B, A]) == [A, B]
    assert view.merge([B]) == [B]
    assert view.merge([]) == []


def test_held_view_keeps_workers_until_they_are_back_or_time_is_up() -> None:
    clock = Clock()
    view = View(10, clock)
    view.merge([A, B])
    view.hold()
    assert view.merge([]) == [A, B]
    assert view.merge([A]) == [A, B]
    assert view.merge([]) == [B]  # A was back: its record counts again
    clock.now += 10
    assert view.merge([]) == []


def test_a_second_loss_extends_the_hold() -> None:
    clock = Clock()
    view = View(10, clock)
    view.merge([A, B])
    view.hold()
    view.merge([A])
    clock.now += 9
    view.hold()
    assert view.merge([]) == [A, B]
    clock.now += 9
    assert view.merge([]) == [A, B]
    clock.now += 1
    assert view.merge([]) == []


def test_who_leaves_by_itself_is_not_held() -> None:
    view = View(10, Clock())
    view.merge([A, B])
    view.hold()
    view.left(A.worker_id)
    view.left("unknown")
    assert view.merge([]) == [B]


def test_a_worker_restarted_during_the_hold_counts_once() -> None:
    view = View(10, Clock())
    view.merge([A])
    view.hold()
    newer = WorkerRecord("CONTEXT-h:1-1700000000999-7-000", "h", 1, 0)
    assert view.merge([newer]) == [newer]
