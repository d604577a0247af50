"""The life of one worker server: bind → engine → serve → register … deregister → drain → stop → close."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette

import context_worker.app
import generation_worker.app
from context_worker.app import Worker, WorkerOptions
from context_worker.kv_plane import KvPlane, is_kept_in
from engine.checkpoint import open_checkpoint, resolve_model
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.mock_profile import MockProfile
from kvstore.protocol import ServerRole, WorkerRecord, join_address
from kvstore.registry import Registration, new_worker_id, register_worker
from openai_api.tokenizer import Tokenizer
from trtllm_serve.binding import bound_port, reachable_host, write_report
from trtllm_serve.settings import WorkerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE_S = 75
"""Longer than a router keeps idle connections, so that the side that sends is the one that closes."""

EXIT_ENGINE_DIED = 1

_ENGINE_END_S = 10.0


class WorkerServer:
    """One worker process. `run` returns its exit code. Times in seconds.

    `notice` passes between leaving the registry and the end of accepting, for routers to hear of it; `grace` bounds the
    wait for hand-offs to be fetched, and then the wait for open requests.
    """

    def __init__(
        self, settings: WorkerSettings, sock: socket.socket, *, notice: float = 1.0, grace: float = 30.0
    ) -> None:
        self._settings = settings
        self._socket = sock
        self._notice = notice
        self._grace = grace
        self._told = asyncio.Event()  # a signal came
        self._signal: int | None = None
        self._http: _HttpServer | None = None

    async def run(self) -> int:
        """Raises SettingsError and InternalError when start-up fails."""
        self._report()
        with self._signals():
            engine = await self._unless_told(self._start_engine())
            if engine is not None:
                try:
                    await self._serve(engine)
                finally:
                    await engine.close(timeout=_ENGINE_END_S if self._grace else 0)
        if self._signal is not None:
            return 128 + self._signal
        return EXIT_ENGINE_DIED

    # ------------------------------------------------------------ start

    def _report(self) -> None:
        flags = self._settings.flags
        if flags.report_addr is not None:
            write_report(flags.report_addr, flags.host, bound_port(self._socket))

    async def _start_engine(self) -> EngineClient:
        path = await asyncio.to_thread(resolve_model, self._settings.model)
        endpoint = join_address(reachable_host(self._socket), bound_port(self._socket))
        tokenizer = self._settings.flags.tokenizer
        config = msgspec.structs.replace(
            self._settings.engine,
            model=path,
            endpoint=endpoint,
            tokenizer=resolve_model(tokenizer) if tokenizer else None,
        )
        self._tokenizer = await asyncio.to_thread(self._load_tokenizer, path)
        started = time.monotonic()
        engine = await self._open_engine(config)
        logger.info("engine ready after %.1f s: %d KV blocks", time.monotonic() - started, engine.ready.num_blocks)
        return engine

    async def _open_engine(self, config: EngineConfig) -> EngineClient:
        if config.backend != "mock":
            return await EngineClient.start(config)
        from engine.mock import MockEngine

        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        longest = config.max_seq_len or checkpoint.max_seq_len
        config = msgspec.structs.replace(config, max_seq_len=longest)
        profile = config.mock or MockProfile()
        return MockEngine(config, profile, checkpoint.vocab_size, sorted(checkpoint.eos_token_ids))

    def _load_tokenizer(self, model_path: str) -> Tokenizer:
        flags = self._settings.flags
        tokenizer = Tokenizer.load(resolve_model(flags.tokenizer) if flags.tokenizer else model_path)
        if flags.chat_template is not None:
            tokenizer.use_chat_template(template_text(flags.chat_template))
        return tokenizer

    def _application(self, worker: Worker) -> Starlette:
        if self._settings.role is ServerRole.CONTEXT:
            return context_worker.app.create_app(worker)
        return generation_worker.app.create_app(worker)

    def _registration(self) -> Registration | None:
        cluster = self._settings.cluster
        if cluster is None:
            return None
        host, port, role = reachable_host(self._socket), bound_port(self._socket), self._settings.role
        record = WorkerRecord(new_worker_id(role, host, port), host, port, role)
        return register_worker(
            cluster.cluster_uri,
            cluster.cluster_name,
            record,
            cluster.heartbeat_interval_sec,
            cluster.inactive_timeout_sec,
        )

    # ------------------------------------------------------------ serve

    async def _serve(self, engine: EngineClient) -> None:
        settings = self._settings
        served_name = settings.flags.served_model_name or settings.model
        options = WorkerOptions(
            role=settings.flags.server_role,
            served_name=served_name,
            aliases=(settings.model, Path(settings.model).name),
            max_batch_size=settings.engine.max_batch_size,
            fault_injection=settings.engine.fault_injection,
            endpoint=join_address(reachable_host(self._socket), bound_port(self._socket)),
            internal_request_auth_key=settings.internal_request_auth_key,
            block_reuse=settings.engine.enable_block_reuse,
            reasoning_parser=settings.reasoning_parser,
            kept_lists=_kept_lists(settings.engine),
        )
        worker = Worker(engine, self._tokenizer, options)
        registration = self._registration()
        self._http = _HttpServer(self._application(worker), self._grace)
        async with self._kv_plane(engine, registration), asyncio.TaskGroup() as group:
            group.create_task(self._http.serve([self._socket]))
            await self._http.listening.wait()
            self._settled(served_name)
            if registration is not None:
                registration.start()
            await self._unless_told(engine.wait_dead())
            await self._wind_down(engine, worker, registration)

    def _kv_plane(
        self, engine: EngineClient, registration: Registration | None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """KV events and leases go to the same Redis as the worker's record, if there is one."""
        cluster = self._settings.cluster
        if cluster is None or registration is None or not is_kept_in(cluster.cluster_uri):
            return contextlib.nullcontext()
        return KvPlane(
            engine,
            cluster.cluster_uri,
            cluster.cluster_name,
            registration.record.worker_id,
            ttl=cluster.inactive_timeout_sec,
            lease_time=self._settings.engine.handoff_timeout,
        ).publishing()

    def _settled(self, served_name: str) -> None:
        # What is there now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        flags = self._settings.flags
        address = join_address(flags.host, bound_port(self._socket))
        logger.info("serving %s on http://%s, role %s", served_name, address, flags.server_role)

    async def _wind_down(self, engine: EngineClient, worker: Worker, registration: Registration | None) -> None:
        assert self._http is not None
        worker.draining = True
        if not engine.alive:
            logger.error("the engine process has ended: this server goes down, for its supervisor to start it again")
        if registration is not None:
            await asyncio.to_thread(registration.stop)
        if engine.alive:
            await asyncio.sleep(self._notice)
            await self._handoffs_fetched(engine)
        worker.stopping.set()
        self._http.should_exit = True

    async def _handoffs_fetched(self, engine: EngineClient) -> None:
        """Pages that a generation worker is to fetch stay readable, and acknowledgements are still taken."""
        deadline = time.monotonic() + self._grace
        # The engine reports counts, not events.
        while engine.alive and engine.stats.handoffs_open and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        watched = (signal.SIGTERM, signal.SIGINT)
        for number in watched:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in watched:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        """The first one begins the orderly end; another one cuts it short."""
        if self._signal is None:
            self._signal = number
            logger.info("%s: shutting down", signal.Signals(number).name)
            self._told.set()
            return
        logger.warning("%s again: open requests are dropped", signal.Signals(number).name)
        self._notice = self._grace = 0.0
        if self._http is not None:
            self._http.should_exit = self._http.force_exit = True

    async def _unless_told(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None when a signal came first, and `work` was cancelled."""
        task = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for future in (task, told):
                future.cancel()
            await asyncio.gather(task, told, return_exceptions=True)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers, on our socket."""

    def __init__(self, app: Starlette, grace: float) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(grace),
        )
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def template_text(template: str) -> str:
    """`--chat_template` is a file or the template itself."""
    if "{" not in template and os.path.isfile(template):
        return Path(template).read_text("utf-8")
    return template


def _kept_lists(engine: EngineConfig) -> tuple[str, ...]:
    """What can be read over HTTP, of context_worker.drained.SETTINGS."""
    kept = {
        "iterations": engine.enable_iter_perf_stats,
        "requests": engine.return_perf_metrics,
        "cache_events": engine.event_buffer_max_size > 0,
    }
    return tuple(name for name, on in kept.items() if on)
