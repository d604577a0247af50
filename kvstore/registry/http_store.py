"""The registry that a router hosts itself: storage in memory, its HTTP routes, and the view over it.

    POST   /set         {key, value = "", expire_time = -1, ttl = -1, overwrite_if_exists = false}
    GET    /get?key=
    DELETE /delete?key=
    GET    /expire?key=&ttl=
    GET    /get_prefix?key_prefix=&keys_only=

Each answers {"result": …}, with 200 if the result is truthy and 400 if it is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.errors import InvalidRequest, openai_error_body
from kvstore.protocol import WorkerRecord, worker_key_prefix
from kvstore.registry.membership import Membership, RecordReader
from kvstore.registry.records import newest_per_address

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_MAX_WAIT = 1.0  # seconds between looks for expired keys
_MAX_BODY = 64 * 1024  # bytes of a /set body; a record has about 150


@dataclasses.dataclass(slots=True)
class _Item:
    value: str
    expires: float  # on the store's clock; inf: never


class HttpStore:
    """Keys with a time to live. For one event loop; nothing here blocks. `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._items: dict[str, _Item] = {}
        self._waiting: set[asyncio.Event] = set()
        self.version = 0  # rises with every change of keys or values

    def __repr__(self) -> str:
        return f"<HttpStore keys={len(self._items)} version={self.version} waiting={len(self._waiting)}>"

    def set(
        self, key: str, value: str = "", *, ttl: float = -1, expire_time: float = -1, overwrite_if_exists: bool = False
    ) -> bool:
        """False: the key exists and was not to be overwritten. `expire_time` is on the store's clock and comes before
        `ttl` (seconds); neither above 0: the key stays."""
        self.sweep()
        present = self._items.get(key)
        if present is not None and not overwrite_if_exists:
            return False
        expires = expire_time if expire_time >= 0 else self._clock() + ttl if ttl > 0 else math.inf
        self._items[key] = _Item(value, expires)
        if present is None or present.value != value:
            self._changed()
        return True

    def get(self, key: str) -> str | None:
        self.sweep()
        item = self._items.get(key)
        return None if item is None else item.value

    def delete(self, key: str) -> bool:
        self.sweep()
        if self._items.pop(key, None) is None:
            return False
        self._changed()
        return True

    def expire(self, key: str, ttl: float) -> bool:
        """The key lives for `ttl` seconds from now. False: there is no such key."""
        self.sweep()
        item = self._items.get(key)
        if item is None:
            return False
        item.expires = self._clock() + ttl
        return True

    def get_prefix(self, key_prefix: str, keys_only: bool = False) -> dict[str, str]:
        self.sweep()
        return {key: "" if keys_only else item.value for key, item in self._items.items() if key.startswith(key_prefix)}

    def sweep(self) -> None:
        """Drops what has expired. Every call of the store does; watchers see expiries within a second."""
        now = self._clock()
        expired = [key for key, item in self._items.items() if item.expires <= now]
        for key in expired:
            del self._items[key]
        if expired:
            self._changed()

    async def wait_change(self, version: int, timeout: float = _MAX_WAIT) -> None:
        """Returns when `self.version` is no longer `version`, at the latest after `timeout` seconds."""
        if self.version != version:
            return
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            self.sweep()
        finally:
            self._waiting.discard(event)

    def wake(self) -> None:
        """Ends all waits."""
        for event in self._waiting:
            event.set()

    def _changed(self) -> None:
        self.version += 1
        self.wake()


class HttpMembership(Membership):
    def __init__(self, url: str, cluster_name: str, store: HttpStore) -> None:
        self.uri = url
        self.state = "up"
        self._prefix = worker_key_prefix(cluster_name)
        self._store = store
        self._closed = False
        self._reader = RecordReader()

    async def watch(self) -> AsyncIterator[list[WorkerRecord]]:
        shown: list[WorkerRecord] | None = None
        while not self._closed:
            self._store.sweep()
            version = self._store.version
            records = newest_per_address(self._reader.read(self._store.get_prefix(self._prefix)))
            if records != shown:
                shown = records
                yield list(records)
            await self._store.wait_change(version)

    async def aclose(self) -> None:
        self._closed = True
        self._store.wake()


class _SetBody(msgspec.Struct):
    key: str
    value: str | None = ""
    expire_time: float | None = -1
    ttl: float | None = -1
    overwrite_if_exists: bool | None = False


def storage_routes(store: HttpStore) -> list[Route]:
    """For the router's application: `app.router.routes.extend(storage_routes(store))`."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(result: Any, error: InvalidRequest | None = None) -> Response:
        body = {"result": result} | (openai_error_body(error) if error else {})
        return Response(json.dumps(body), 200 if result else 400, media_type="application/json")

    def route(path: str, method: str, act: Callable[[Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                result = act(request)
                return answer(await result if asyncio.iscoroutine(result) else result)
            except InvalidRequest as error:
                return answer(None, error)
            except ClientDisconnect:
                return answer(None)

        return Route(path, endpoint, methods=[method])

    async def set_key(request: Request) -> bool:
        item = _set_body(await _limited_body(request))
        return store.set(
            item.key,
            item.value or "",
            ttl=-1 if item.ttl is None else item.ttl,
            expire_time=-1 if item.expire_time is None else item.expire_time,
            overwrite_if_exists=bool(item.overwrite_if_exists),
        )

    return [
        route("/set", "POST", set_key),
        route("/get", "GET", lambda request: store.get(_parameter(request, "key"))),
        route("/delete", "DELETE", lambda request: store.delete(_parameter(request, "key"))),
        route("/expire", "GET", lambda request: store.expire(_parameter(request, "key"), _seconds(request, "ttl"))),
        route(
            "/get_prefix",
            "GET",
            lambda request: store.get_prefix(_parameter(request, "key_prefix"), _flag(request, "keys_only")),
        ),
    ]


async def _limited_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise InvalidRequest(f"body: more than {_MAX_BODY} bytes")
    return body


def _set_body(body: bytes) -> _SetBody:
    try:
        return msgspec.json.decode(body, type=_SetBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"body: {error}") from None


def _parameter(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise InvalidRequest(f"{name}: missing", param=name)
    return value


def _seconds(request: Request, name: str) -> float:
    text = _parameter(request, name)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest(f"{name}: {text!r} is not a number of seconds", param=name)
    return seconds


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("true", "1", "yes", "on")
