"""`python -m trtllm_serve.mock_fleet MODEL --instances N`: N workers with mock engines on N ports of one process.

Each has the real HTTP application, prefix cache and hand-offs of a context or generation worker; MODEL is only needed
for its tokenizer. An idle worker costs a socket and no timer. With `faults.restart_after`, a worker whose engine has
died closes its port and comes back there, empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import click
import httpx
import msgspec
import uvicorn
import uvloop
import yaml
from uvicorn.server import ServerState

import context_worker.app
import generation_worker.app
from context_worker.app import Worker, WorkerOptions
from engine.checkpoint import open_checkpoint, resolve_model
from engine.config import EngineConfig
from engine.mock import MockEngine, MockNetwork
from engine.mock_profile import MockProfile
from generation_worker.acknowledge import Acknowledger
from kvstore.errors import SettingsError
from kvstore.protocol import WorkerRecord, join_address
from kvstore.registry import Registration, new_worker_id, register_worker
from openai_api.tokenizer import Tokenizer
from trtllm_serve.binding import bind, bound_port, reachable_host
from trtllm_serve.settings import ROLES

log = logging.getLogger(__name__)

_DRAIN_S = 5.0


class MockModel:
    """What all workers of a fleet share."""

    def __init__(self, model: str, config: EngineConfig, profile: MockProfile) -> None:
        path = resolve_model(model)
        checkpoint = open_checkpoint(path)
        self.name = model
        self.tokenizer = Tokenizer.load(path)
        self.vocab_size = checkpoint.vocab_size
        self.eos_token_ids = sorted(checkpoint.eos_token_ids)
        longest = config.max_seq_len or checkpoint.max_seq_len
        self.config = msgspec.structs.replace(config, model=path, max_seq_len=longest, backend="mock", mock=profile)
        self.profile = profile
        self.network = MockNetwork()

    def engine(self, endpoint: str, faults: bool = True) -> MockEngine:
        profile = self.profile if faults else msgspec.structs.replace(self.profile, faults=MockProfile().faults)
        config = msgspec.structs.replace(self.config, endpoint=endpoint)
        return MockEngine(config, profile, self.vocab_size, self.eos_token_ids, network=self.network)


class MockWorker:
    """One worker. `run` serves until it is cancelled, or until its engine has died for good."""

    def __init__(self, model: MockModel, role: str, sock: socket.socket, cluster_uri: str | None = None) -> None:
        self._model = model
        self._role = role
        self._socket = sock
        self._cluster_uri = cluster_uri
        self.host, self.port = reachable_host(sock), bound_port(sock)
        self.address = join_address(self.host, self.port)
        self.engine = model.engine(self.address)
        self.serving = asyncio.Event()

    async def run(self) -> None:
        while True:
            engine = self.engine
            try:
                await self._serve(engine)
            finally:
                await engine.close()
            wait = engine.restart_after
            if wait is None:
                return
            self.serving.clear()
            await asyncio.sleep(wait)
            self._socket = bind(self.host, self.port)
            self.engine = self._model.engine(self.address, faults=False)
            log.info("mock worker %s is back as %s", self.address, self.engine.incarnation)

    async def _serve(self, engine: MockEngine) -> None:
        options = WorkerOptions(
            role=self._role,
            served_name=self._model.name,
            max_batch_size=self._model.config.max_batch_size,
            fault_injection=True,
            endpoint=self.address,
        )
        worker = Worker(engine, self._model.tokenizer, options)
        if self._role == "context":
            app = context_worker.app.create_app(worker)
        else:
            # Without certificates, whose loading takes most of a worker's start: no address here is https.
            acknowledger = Acknowledger(httpx.AsyncHTTPTransport(verify=False))
            app = generation_worker.app.create_app(worker, acknowledger)
        async with _listening(app, self._socket, engine), self._registered():
            self.serving.set()
            try:
                await engine.wait_dead()
            finally:
                worker.draining = True
                worker.stopping.set()

    @contextlib.asynccontextmanager
    async def _registered(self) -> AsyncGenerator[None, None]:
        if self._cluster_uri is None:
            yield
            return
        role = ROLES[self._role]
        record = WorkerRecord(new_worker_id(role, self.host, self.port), self.host, self.port, role)
        registration: Registration = register_worker(self._cluster_uri, "", record, 2.0, 6.0)
        registration.start()
        try:
            yield
        finally:
            await asyncio.to_thread(registration.stop)


@contextlib.asynccontextmanager
async def _listening(app: Any, sock: socket.socket, engine: MockEngine) -> AsyncGenerator[None, None]:
    """The application on the socket. uvicorn's Server would wake ten times a second for each worker."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=False, proxy_headers=False, timeout_keep_alive=75,
    )  # fmt: skip
    config.load()
    state = ServerState()
    protocol = cast("type[Any]", config.http_protocol_class)
    loop = asyncio.get_running_loop()

    def connect() -> asyncio.Protocol:
        return cast("asyncio.Protocol", protocol(config=config, server_state=state, app_state={}))

    async with app.router.lifespan_context(app):
        server = await loop.create_server(connect, sock=sock, backlog=2048)
        try:
            yield
        finally:
            server.close()
            for connection in list(state.connections):
                if engine.alive:
                    connection.shutdown()
                elif (transport := connection.transport) is not None:
                    transport.abort()
            if state.tasks:
                await asyncio.wait(state.tasks, timeout=_DRAIN_S)


class MockFleet:
    """`async with MockFleet(...) as fleet`: all workers serve inside the block."""

    def __init__(
        self,
        model: MockModel,
        role: str,
        instances: int,
        host: str = "127.0.0.1",
        port: int = 0,
        cluster_uri: str | None = None,
    ) -> None:
        """Ports `port`, `port` + 1, …; 0: free ones."""
        sockets = [bind(host, port + index if port else 0) for index in range(instances)]
        self.workers = [MockWorker(model, role, sock, cluster_uri) for sock in sockets]
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(worker.run()) for worker in self.workers]
        for worker in self.workers:
            await worker.serving.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, error, trace)

    async def ended(self) -> None:
        """Until no worker is left."""
        await asyncio.wait(self._tasks)


@click.command()
@click.argument("model")
@click.option("--instances", type=click.IntRange(1), default=1, show_default=True, help="How many workers.")
@click.option("--server_role", type=click.Choice(list(ROLES)), default="aggregated", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=0, help="Of the first one; the others follow. 0 picks free ones.")
@click.option("--disagg_cluster_uri", help="Registry that the workers join.")
@click.option("--profile", type=click.Path(exists=True), help="YAML file with times, answers and faults.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Field of the engine's configuration.")
@click.option("--report", type=click.Path(), help="File to write the addresses into, one a line, once all serve.")
def main(
    model: str, instances: int, server_role: str, host: str, port: int, disagg_cluster_uri: str | None,
    profile: str | None, assignments: Sequence[str], report: str | None,
) -> None:  # fmt: skip
    """Serve INSTANCES mock workers from one process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    shared = MockModel(model, _engine_config(assignments), read_profile(profile))

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with MockFleet(shared, server_role, instances, host, port, disagg_cluster_uri) as fleet:
            _tell(fleet.addresses, report)
            waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(fleet.ended())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _tell(addresses: Sequence[str], report: str | None) -> None:
    lines = "\n".join(addresses) + "\n"
    if report is not None:
        Path(report).write_text(lines)
    click.echo(lines, nl=False)


def read_profile(path: str | None) -> MockProfile:
    """SettingsError names what is wrong in the file."""
    if path is None:
        return MockProfile()
    return mock_profile(yaml.safe_load(Path(path).read_text("utf-8")), path)


def mock_profile(content: Any, source: str) -> MockProfile:
    try:
        return msgspec.convert(content or {}, MockProfile)
    except msgspec.ValidationError as error:
        raise SettingsError([(source, str(error))]) from None


def _engine_config(assignments: Sequence[str]) -> EngineConfig:
    values: dict[str, Any] = {"model": "", "max_num_tokens": 8192, "max_batch_size": 256}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in EngineConfig.__struct_fields__:
            raise click.BadParameter(f"{assignment!r} must be NAME=VALUE with a field of EngineConfig")
        values[name] = yaml.safe_load(value)
    return msgspec.convert(values, EngineConfig)


if __name__ == "__main__":
    main()
