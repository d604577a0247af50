"""The end of the process when it is not asked for: a failure inside must not leave it hanging."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
import uvloop

from router.app import Router, RouterOptions
from router.config import parse_config
from router.discovery import Discovery
from router.server import serve
from trtllm_serve.binding import bind, bound_port


def test_a_failed_task_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = threading.Event()

    async def broken(self: Discovery, config: Any) -> None:
        while not fail.is_set():  # noqa: ASYNC110 - set from another thread
            await asyncio.sleep(0.01)
        raise RuntimeError("scripted")

    monkeypatch.setattr(Discovery, "run_static", broken)
    config = parse_config({})
    listener = bind("127.0.0.1", 0)
    port = bound_port(listener)

    def keep_a_connection() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/health").status_code == 503
            fail.set()
            with pytest.raises(httpx.HTTPError):
                for _ in range(1000):
                    client.get("/version")

    user = threading.Thread(target=keep_a_connection)

    async def main() -> int:
        return await serve(Router(config, RouterOptions()), listener, user.start, 60)

    with (
        listener,
        pytest.raises(ExceptionGroup, match="unhandled"),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main())
    user.join(10)
    assert not user.is_alive()
