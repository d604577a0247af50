"""The router's process: listen, serve, drain, close.

Shutdown is: stop accepting → let requests end, at most `DRAIN_TIMEOUT` → cancel the rest → send the releases owed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from router.app import Router, create_app
from router.front_door import protocol_for

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 30  # seconds
BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
START_FAILED = 1


class RouterServer(uvicorn.Server):
    """Calls `on_started` once it accepts, and keeps the signal that ended it instead of raising it again."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], owns_process: bool) -> None:
        super().__init__(config)
        self.signum: int | None = None
        self._signals = _SIGNALS if owns_process else ()
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """However it ends, nothing stays open: a listener or connection left over would keep the loop from closing."""
        try:
            await super().serve(sockets)
        finally:
            for listener in getattr(self, "servers", ()):
                listener.close()
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in self._signals:
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        try:
            yield
        finally:
            for signum in self._signals:
                loop.remove_signal_handler(signum)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one stops waiting."""
        self.force_exit = self.signum is not None
        self.signum = self.signum or sig
        self.should_exit = True


def make_server(router: Router, on_started: Callable[[], None], owns_process: bool = True) -> RouterServer:
    """Inside `router.running()`. `owns_process`: signals end it."""
    config = uvicorn.Config(
        create_app(router),
        http=protocol_for(router.orchestrator),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=router.config.server_keep_alive_timeout,
        timeout_graceful_shutdown=DRAIN_TIMEOUT,
    )
    return RouterServer(config, on_started, owns_process)


async def serve(router: Router, listener: socket.socket, on_started: Callable[[], None], start_timeout: float) -> int:
    """Serve until a signal; returns the exit code: 128 + its number, or 1 if the workers did not come in time."""
    async with router.running(), asyncio.TaskGroup() as group:
        server = make_server(router, on_started)
        watch = group.create_task(_watch_start(router, server, start_timeout))
        await server.serve([listener])
        watch.cancel()
    return 128 + server.signum if server.signum else START_FAILED


async def _watch_start(router: Router, server: RouterServer, start_timeout: float) -> None:
    """With workers given by url, a cluster that never gets ready ends the router. Others may join a registry later."""
    cluster = router.cluster
    try:
        async with asyncio.timeout(start_timeout if router.config.cluster is None else None):
            while not cluster.ready:  # noqa: ASYNC110 - readiness is looked at by many and waited for once
                await asyncio.sleep(0.1)
    except TimeoutError:
        logger.error("not ready within %g s: %s", start_timeout, cluster.why_not_ready())
        server.should_exit = True
        return
    gc.collect()
    gc.freeze()  # what start-up made lives as long as the process: collections need not look at it
