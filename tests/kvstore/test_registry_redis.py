"""Registration and membership against a real Valkey, and what happens when it fails."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from registry_helpers import eventually, eventually_async, valkey_client, watching

from kvstore.protocol import ServerRole, WorkerRecord
from kvstore.registry import Registration, new_worker_id, open_membership, record_key, register_worker
from kvstore.registry.embedded import EmbeddedValkey

CLUSTER = "test [cluster]*"  # glob characters are part of the name
BEAT, TTL = 0.1, 0.6


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


def worker(port: int, role: ServerRole = ServerRole.CONTEXT) -> WorkerRecord:
    return WorkerRecord(new_worker_id(role, "127.0.0.1", port), "127.0.0.1", port, int(role))


def registered(uri: str, port: int, beat: float = BEAT, ttl: float = TTL) -> Registration:
    registration = register_worker(uri, CLUSTER, worker(port), beat, ttl)
    registration.start()
    return registration


# ---------------------------------------------------------------- the worker's side


def test_the_record_is_upstreams_and_lives_by_heartbeats(valkey: EmbeddedValkey) -> None:
    registration = registered(valkey.uri, 8001)
    with valkey_client(valkey) as client:
        key = record_key(CLUSTER, registration.record.worker_id)
        eventually(lambda: client.exists(key))
        assert json.loads(str(client.get(key))) == {
            "worker_id": registration.record.worker_id, "host": "127.0.0.1", "port": 8001, "role": 0,
        }  # fmt: skip
        assert 0 < client.pttl(key) <= TTL * 1000
        deadline = time.monotonic() + 2.5 * TTL
        while time.monotonic() < deadline:
            assert client.exists(key)
            time.sleep(0.02)
        assert registration.state == "registered" and registration.registrations == 1
        registration.stop()
        assert client.exists(key) == 0
        assert registration.state == "stopped"


def test_start_returns_at_once_and_keeps_trying(valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture) -> None:
    port = valkey.port
    valkey.stop()
    with caplog.at_level(logging.INFO, logger="kvstore.registry.registration"):
        before = time.monotonic()
        registration = registered(f"redis://127.0.0.1:{port}/0", 8001)
        assert time.monotonic() - before < 0.2
        eventually(lambda: "refused" in registration.state)
        assert registration.state.startswith("retrying: ")
        time.sleep(0.4)  # several attempts
        valkey.start()
        eventually(lambda: registration.state == "registered", timeout=3)
    registration.stop()
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"], [record.message for record in caplog.records]


def test_flushall_is_healed_by_the_next_heartbeat(valkey: EmbeddedValkey) -> None:
    registration = registered(valkey.uri, 8001)
    with valkey_client(valkey) as client:
        key = record_key(CLUSTER, registration.record.worker_id)
        eventually(lambda: client.exists(key))
        client.flushall()
        eventually(lambda: client.exists(key), timeout=2 * BEAT + 0.2)
    registration.stop()


def test_a_registry_restarted_empty_has_the_worker_back(valkey: EmbeddedValkey) -> None:
    registration = registered(valkey.uri, 8001)
    eventually(lambda: registration.state == "registered")
    os.kill(valkey.pid, signal.SIGKILL)
    eventually(lambda: registration.state.startswith("retrying: "), timeout=BEAT + 1)
    valkey.start()  # the same port, nothing kept
    with valkey_client(valkey) as client:
        eventually(lambda: client.exists(record_key(CLUSTER, registration.record.worker_id)), timeout=1.5)
    eventually(lambda: registration.state == "registered")
    registration.stop()


def test_a_paused_registry_is_a_failure_and_no_hang(valkey: EmbeddedValkey) -> None:
    registration = registered(valkey.uri, 8001)
    eventually(lambda: registration.state == "registered")
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        eventually(lambda: registration.state.startswith("retrying: "), timeout=3)
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    eventually(lambda: registration.state == "registered", timeout=3)
    registration.stop()


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_stop_is_bounded_while_the_registry_is_down(valkey: EmbeddedValkey, fault: str) -> None:
    registration = registered(valkey.uri, 8001)
    eventually(lambda: registration.state == "registered")
    os.kill(valkey.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    before = time.monotonic()
    registration.stop(timeout=3)
    assert time.monotonic() - before < 3.5
    assert registration.state == "stopped"
    if fault == "paused":
        os.kill(valkey.pid, signal.SIGCONT)
    eventually(lambda: not _registry_threads(), timeout=5)


def test_stop_before_start_and_twice(valkey: EmbeddedValkey) -> None:
    registration = register_worker(valkey.uri, CLUSTER, worker(8001), BEAT, TTL)
    registration.stop()
    registration.stop()
    assert registration.state == "stopped"


def test_stop_races_with_registering(valkey: EmbeddedValkey) -> None:
    """Whatever the thread is doing, a stopped worker leaves no record and no thread."""
    for _ in range(20):
        registered(valkey.uri, 8001).stop()
    with valkey_client(valkey) as client:
        assert client.keys("*/workers/*") == []
    assert not _registry_threads()


def test_a_paused_worker_is_back_after_its_record_ran_out(valkey: EmbeddedValkey) -> None:
    code = (
        "import sys, time; from kvstore.protocol import WorkerRecord; from kvstore.registry import register_worker\n"
        f"register_worker({valkey.uri!r}, {CLUSTER!r}, WorkerRecord('w', 'h', 1, 0), {BEAT}, {TTL}).start()\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process, valkey_client(valkey) as client:
        try:
            key = record_key(CLUSTER, "w")
            eventually(lambda: client.exists(key))
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: not client.exists(key), timeout=TTL + 1)
            process.send_signal(signal.SIGCONT)
            eventually(lambda: client.exists(key), timeout=2 * BEAT + 0.2)
        finally:
            process.kill()


def test_wrong_password_is_named_and_not_shown(valkey: EmbeddedValkey) -> None:
    with valkey_client(valkey) as client:
        client.config_set("requirepass", "right")
    registration = registered(valkey.uri.replace("redis://", "redis://:hunter2@"), 8001)
    eventually(lambda: "first attempt" not in registration.state)
    assert "hunter2" not in registration.state
    assert "password" in registration.state.lower()
    registration.stop()


def _registry_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("registry ")]


# ---------------------------------------------------------------- the router's side


async def test_watch_shows_the_start_and_each_change(valkey: EmbeddedValkey) -> None:
    first = await asyncio.to_thread(registered, valkey.uri, 8001)
    await eventually_async(lambda: first.state == "registered")
    async with watching(open_membership(valkey.uri, CLUSTER)) as views:
        await eventually_async(lambda: views.ids == [first.record.worker_id])
        second = registered(valkey.uri, 8002)
        await eventually_async(lambda: views.ids == [first.record.worker_id, second.record.worker_id])
        await asyncio.to_thread(first.stop)
        await eventually_async(lambda: views.ids == [second.record.worker_id])
        await asyncio.to_thread(second.stop)
        await eventually_async(lambda: views.ids == [])
    assert [len(view) for view in views.all] == [1, 2, 1, 0]


async def test_an_empty_cluster_is_shown_at_once(valkey: EmbeddedValkey) -> None:
    async with watching(open_membership(valkey.uri, CLUSTER)) as views:
        await eventually_async(lambda: views.all == [[]], timeout=2)


async def test_changes_arrive_by_message_and_not_by_poll(valkey: EmbeddedValkey) -> None:
    async with watching(open_membership(valkey.uri, CLUSTER)) as views:
        await eventually_async(lambda: views.ids == [])
        delays = []
        for port in range(8001, 8006):
            registration = registered(valkey.uri, port)
            await eventually_async(lambda wanted=registration: wanted.registrations == 1)
            written = time.monotonic()
            await eventually_async(lambda wanted=registration: wanted.record.worker_id in (views.ids or []))
            delays.append(time.monotonic() - written)
            await asyncio.to_thread(registration.stop)
        assert sorted(delays)[2] < 0.2, delays  # the poll alone: 0.25 on average, up to 0.5


async def test_a_worker_that_stops_answering_expires(valkey: EmbeddedValkey) -> None:
    with valkey_client(valkey) as client:
        record = worker(8001)
        client.set(record_key(CLUSTER, record.worker_id), json.dumps(_fields(record)), px=400)
        async with watching(open_membership(valkey.uri, CLUSTER)) as views:
            await eventually_async(lambda: views.ids == [record.worker_id])
            await eventually_async(lambda: views.ids == [], timeout=0.4 + 0.5 + 0.5)
        assert client.smembers(f"/trtllm-disagg/{CLUSTER}/index") == set()


async def test_records_of_other_writers_are_found_in_a_big_database(valkey: EmbeddedValkey) -> None:
    record = worker(8001)
    with valkey_client(valkey) as client:
        client.mset({f"other:{number}": "x" for number in range(3000)})
        client.set("/trtllm-disagg/test c/workers/x", "another cluster, which a bad glob would match")
        client.set(record_key(CLUSTER, record.worker_id), json.dumps(_fields(record)), ex=30)
        async with watching(open_membership(valkey.uri, CLUSTER)) as views:
            await eventually_async(lambda: views.ids == [record.worker_id])
            assert client.smembers(f"/trtllm-disagg/{CLUSTER}/index") == {record.worker_id}


async def test_unreadable_records_are_skipped_by_name(valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture) -> None:
    good = registered(valkey.uri, 8001)
    with valkey_client(valkey) as client, caplog.at_level(logging.WARNING):
        client.set(record_key(CLUSTER, "bad"), b"\xff\x00")
        async with watching(open_membership(valkey.uri, CLUSTER)) as views:
            await eventually_async(lambda: views.ids == [good.record.worker_id])
            await asyncio.sleep(1.2)  # two more looks
    assert sum("workers/bad is skipped" in record.message for record in caplog.records) == 1
    await asyncio.to_thread(good.stop)


async def test_clusters_do_not_see_each_other(valkey: EmbeddedValkey) -> None:
    registration = registered(valkey.uri, 8001)
    await eventually_async(lambda: registration.state == "registered")
    async with watching(open_membership(valkey.uri, CLUSTER + "2")) as views:
        await eventually_async(lambda: views.ids == [])
        await asyncio.sleep(0.6)
        assert views.ids == []
    await asyncio.to_thread(registration.stop)


async def test_a_dead_registry_leaves_the_last_view_and_recovers(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    registration = registered(valkey.uri, 8001)
    membership = open_membership(valkey.uri, CLUSTER, grace=TTL)
    with caplog.at_level(logging.INFO, logger="kvstore.registry"):
        async with watching(membership) as views:
            await eventually_async(lambda: views.ids == [registration.record.worker_id])
            os.kill(valkey.pid, signal.SIGKILL)
            await eventually_async(lambda: membership.state.startswith("down: "))
            await asyncio.sleep(TTL + 0.3)
            assert views.ids == [registration.record.worker_id]
            await asyncio.to_thread(valkey.start)
            await eventually_async(lambda: membership.state == "up")
            await eventually_async(lambda: registration.registrations >= 2)
            await asyncio.sleep(TTL + 0.6)
            assert [len(view) for view in views.all] == [1], "the outage was visible as a change of workers"
            await asyncio.to_thread(registration.stop)
            await eventually_async(lambda: views.ids == [], timeout=2)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and "down" in errors[0]


async def test_flushall_does_not_flicker(valkey: EmbeddedValkey) -> None:
    """Between FLUSHALL and the next heartbeat no record exists; the workers do."""
    registration = registered(valkey.uri, 8001, beat=1.5, ttl=4)
    async with watching(open_membership(valkey.uri, CLUSTER, grace=4)) as views:
        await eventually_async(lambda: views.ids == [registration.record.worker_id])
        with valkey_client(valkey) as client:
            client.flushall()
            await eventually_async(lambda: registration.registrations == 2, timeout=3)
        await asyncio.sleep(0.7)
        assert [len(view) for view in views.all] == [1]
        await asyncio.to_thread(registration.stop)
        await eventually_async(lambda: views.ids == [], timeout=2)


async def test_workers_that_died_with_the_registry_leave_after_the_grace(valkey: EmbeddedValkey) -> None:
    record = worker(8001)
    with valkey_client(valkey) as client:
        client.set(record_key(CLUSTER, record.worker_id), json.dumps(_fields(record)), ex=30)
        async with watching(open_membership(valkey.uri, CLUSTER, grace=1.0)) as views:
            await eventually_async(lambda: views.ids == [record.worker_id])
            client.flushall()
            flushed = time.monotonic()
            await eventually_async(lambda: views.ids == [], timeout=3)
            assert time.monotonic() - flushed >= 0.9


async def test_watching_begins_while_the_registry_is_down(valkey: EmbeddedValkey) -> None:
    valkey.stop()
    membership = open_membership(valkey.uri, CLUSTER)
    assert membership.state.startswith("down")
    async with watching(membership) as views:
        await eventually_async(lambda: "refused" in membership.state or "connect" in membership.state.lower())
        assert views.all == []
        await asyncio.to_thread(valkey.start)
        await eventually_async(lambda: views.all == [[]], timeout=3)


async def test_closing_ends_the_watch_soon(valkey: EmbeddedValkey) -> None:
    membership = open_membership(valkey.uri, CLUSTER)
    async with watching(membership) as views:
        await eventually_async(lambda: views.ids == [])
        before = time.monotonic()
        await membership.aclose()
        await membership.aclose()
    assert time.monotonic() - before < 2


async def test_a_cancelled_watch_leaves_no_connection(valkey: EmbeddedValkey) -> None:
    membership = open_membership(valkey.uri, CLUSTER)

    async def watch() -> None:
        async for _ in membership.watch():
            seen.set()

    seen = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch())
        await seen.wait()
        task.cancel()
    await membership.aclose()
    with valkey_client(valkey) as client:
        await eventually_async(lambda: len(client.client_list()) == 1)


async def test_an_embedded_registry_of_the_router_ends_with_it() -> None:
    membership = open_membership("redis://embedded", CLUSTER)
    registration = registered(membership.uri, 8001)
    async with watching(membership) as views:
        await eventually_async(lambda: views.ids == [registration.record.worker_id])
        await asyncio.to_thread(registration.stop)
    late = registered(membership.uri, 8001)
    await eventually_async(lambda: "refused" in late.state)
    await asyncio.to_thread(late.stop)


def _fields(record: WorkerRecord) -> dict[str, object]:
    return {"worker_id": record.worker_id, "host": record.host, "port": record.port, "role": record.role}
