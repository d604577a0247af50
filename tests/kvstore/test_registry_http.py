"""The storage that a router hosts: the store alone, its routes through a real socket, and a worker's side of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn
from registry_helpers import eventually, eventually_async, watching
from starlette.applications import Starlette

from kvstore.protocol import ServerRole, WorkerRecord
from kvstore.registry import Registration, new_worker_id, open_membership, record_key, register_worker
from kvstore.registry.http_store import HttpStore, storage_routes


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> HttpStore:
    return HttpStore(clock)


# ---------------------------------------------------------------- the store


def test_set_keeps_what_is_there_unless_told(store: HttpStore) -> None:
    assert store.set("k", "1") and not store.set("k", "2")
    assert store.get("k") == "1"
    assert store.set("k", "2", overwrite_if_exists=True) and store.get("k") == "2"


def test_keys_expire_and_an_expired_key_is_no_key(store: HttpStore, clock: Clock) -> None:
    store.set("k", "1", ttl=10)
    clock.now += 9.9
    assert store.get("k") == "1"
    clock.now += 0.1
    assert store.get("k") is None
    assert not store.expire("k", 10) and not store.delete("k") and store.get_prefix("") == {}
    assert store.set("k", "2")  # without overwriting


def test_expire_renews(store: HttpStore, clock: Clock) -> None:
    store.set("k", ttl=10)
    clock.now += 9
    assert store.expire("k", 10)
    clock.now += 9
    assert store.get("k") == ""
    assert store.expire("k", 0) and store.get("k") is None


def test_expire_time_is_absolute_and_comes_first(store: HttpStore, clock: Clock) -> None:
    store.set("k", "1", ttl=1000, expire_time=clock.now + 5)
    clock.now += 5
    assert store.get("k") is None


def test_prefixes(store: HttpStore) -> None:
    store.set("/a/1", "x")
    store.set("/a/2", "y")
    store.set("/b/1", "z")
    assert store.get_prefix("/a/") == {"/a/1": "x", "/a/2": "y"}
    assert store.get_prefix("/a/", keys_only=True) == {"/a/1": "", "/a/2": ""}


def test_versions_count_changes_and_not_heartbeats(store: HttpStore, clock: Clock) -> None:
    store.set("k", "1", ttl=10)
    before = store.version
    store.expire("k", 10)
    store.set("k", "1", ttl=10, overwrite_if_exists=True)
    store.get("k")
    assert store.version == before
    clock.now += 10
    store.sweep()
    assert store.version == before + 1


async def test_waits_end_with_a_change_or_an_expiry(store: HttpStore, clock: Clock) -> None:
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(store.wait_change(store.version, timeout=60))
        await asyncio.sleep(0)
        store.set("k", "1", ttl=10)
        await task
    clock.now += 10
    before = store.version
    await store.wait_change(before, timeout=0.01)
    assert store.version == before + 1
    await store.wait_change(before, timeout=60)  # returns at once: it has changed already
    assert "waiting=0" in repr(store)


async def test_membership_over_the_store(store: HttpStore, clock: Clock) -> None:
    a, b = WorkerRecord("CONTEXT-a", "h", 1, 0), WorkerRecord("GENERATION-b", "h", 2, 1)
    async with watching(open_membership("http://h:1", "c", store)) as views:
        await eventually_async(lambda: views.ids == [])
        for record in (b, a):
            store.set(record_key("c", record.worker_id), json.dumps(_fields(record)), ttl=10)
        store.set(record_key("other", a.worker_id), json.dumps(_fields(a)))
        store.set(record_key("c", "bad"), "{")
        await eventually_async(lambda: views.all[-1] == [a, b])
        store.delete(record_key("c", b.worker_id))
        await eventually_async(lambda: views.all[-1] == [a])
        clock.now += 10
        await eventually_async(lambda: views.ids == [], timeout=2)


# ---------------------------------------------------------------- the routes, through a socket


@contextlib.contextmanager
def serving(store: HttpStore, port: int = 0) -> Iterator[str]:
    """A server in a thread, as the router would run it."""
    listener = socket.create_server(("127.0.0.1", port))
    app = Starlette(routes=storage_routes(store))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
async def client(store: HttpStore) -> AsyncIterator[httpx.AsyncClient]:
    with serving(store) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            yield client


async def test_routes_answer_as_upstream(client: httpx.AsyncClient, clock: Clock) -> None:
    async def call(method: str, target: str, body: object = None) -> tuple[int, object]:
        response = await client.request(method, target, json=body)
        return response.status_code, response.json()

    assert await call("POST", "/set", {"key": "/a/1", "value": "x", "ttl": 10}) == (200, {"result": True})
    assert await call("POST", "/set", {"key": "/a/1", "value": "y"}) == (400, {"result": False})
    whole = {"key": "/a/2", "value": "z", "expire_time": -1, "ttl": -1, "overwrite_if_exists": False}
    assert await call("POST", "/set", whole) == (200, {"result": True})
    assert await call("POST", "/set", whole | {"ttl": None, "overwrite_if_exists": True}) == (200, {"result": True})
    assert await call("GET", "/get?key=/a/1") == (200, {"result": "x"})
    assert await call("GET", "/get?key=/none") == (400, {"result": None})
    assert await call("GET", "/get_prefix?key_prefix=/a/") == (200, {"result": {"/a/1": "x", "/a/2": "z"}})
    keys = await call("GET", "/get_prefix?key_prefix=/a/&keys_only=true")
    assert keys == (200, {"result": {"/a/1": "", "/a/2": ""}})
    assert await call("GET", "/get_prefix?key_prefix=/none") == (400, {"result": {}})
    clock.now += 9
    assert await call("GET", "/expire?key=/a/1&ttl=10") == (200, {"result": True})
    clock.now += 9
    assert await call("GET", "/get?key=/a/1") == (200, {"result": "x"})
    assert await call("GET", "/expire?key=/none&ttl=10") == (400, {"result": False})
    assert await call("DELETE", "/delete?key=/a/1") == (200, {"result": True})
    assert await call("DELETE", "/delete?key=/a/1") == (400, {"result": False})


@pytest.mark.parametrize(
    ("method", "target", "body", "named"),
    [
        ("POST", "/set", b"{", "body"),
        ("POST", "/set", b'{"value": "x"}', "key"),
        ("POST", "/set", b'{"key": 1}', "key"),
        ("POST", "/set", b'{"key": "k", "ttl": "soon"}', "ttl"),
        ("POST", "/set", b'{"key": "k", "value": "%s"}' % (b"x" * 70_000), "65536"),
        ("GET", "/get", None, "key"),
        ("GET", "/expire?key=k", None, "ttl"),
        ("GET", "/expire?key=k&ttl=soon", None, "soon"),
        ("GET", "/expire?key=k&ttl=nan", None, "nan"),
        ("DELETE", "/delete", None, "key"),
        ("GET", "/get_prefix", None, "key_prefix"),
    ],
)
async def test_bad_requests_name_what_is_wrong(
    client: httpx.AsyncClient, method: str, target: str, body: bytes | None, named: str
) -> None:
    response = await client.request(method, target, content=body)
    assert response.status_code == 400
    assert response.json()["result"] is None
    assert named in response.json()["error"]["message"]


async def test_other_methods_are_refused(client: httpx.AsyncClient) -> None:
    assert (await client.get("/set")).status_code == 405
    assert (await client.post("/delete")).status_code == 405


# ---------------------------------------------------------------- the worker's side


def registered(url: str, ttl: float = 0.6) -> Registration:
    record = WorkerRecord(new_worker_id(ServerRole.GENERATION, "127.0.0.1", 9), "127.0.0.1", 9, 1)
    registration = register_worker(url, "c", record, 0.1, ttl)
    registration.start()
    return registration


def test_a_worker_registers_beats_and_leaves() -> None:
    store = HttpStore()
    with serving(store) as url:
        registration = registered(url)
        key = record_key("c", registration.record.worker_id)
        eventually(lambda: registration.state == "registered")
        assert json.loads(store.get_prefix(key)[key]) == _fields(registration.record)
        with pytest.raises(AssertionError):
            eventually(lambda: not store.get_prefix(key), timeout=1.5)
        registration.stop()
        assert store.get_prefix("") == {} and registration.registrations == 1


def test_a_router_restarted_empty_has_the_worker_back() -> None:
    with serving(HttpStore()) as url:
        registration = registered(url)
        eventually(lambda: registration.state == "registered")
    eventually(lambda: registration.state.startswith("retrying: "))
    store = HttpStore()
    with serving(store, port=int(url.rpartition(":")[2])):
        eventually(lambda: store.get_prefix("/trtllm-disagg/c/workers/"), timeout=3)
        eventually(lambda: registration.state == "registered")
        registration.stop()
        assert store.get_prefix("") == {}


def test_a_server_that_is_no_registry_is_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, serving(HttpStore()) as url:
        registration = registered(f"http://127.0.0.1:{listener.getsockname()[1]}")  # accepts, never answers
        eventually(lambda: "timed out" in registration.state, timeout=4)
        registration.stop(timeout=4)
        response = httpx.get(url + "/cluster_info")
        assert response.status_code == 404


def _fields(record: WorkerRecord) -> dict[str, object]:
    return {"worker_id": record.worker_id, "host": record.host, "port": record.port, "role": record.role}
