"""Keeps the table of workers true: who is in the cluster, and how each of them is.

The set comes from the configuration's urls or from the registry. Each worker has one task that probes it (/health, then
/server_info), and one that reads its KV events where a policy wants them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import httpx
import msgspec

from kvstore.protocol import SERVER_INFO_PATH, ServerInfo, ServerRole, WorkerRecord
from kvstore.registry import Membership
from router.cluster import Cluster, records_by_id
from router.config import DisaggConfig
from router.events import follow_events
from router.worker import Worker, WorkerState

logger = logging.getLogger(__name__)

PROBE_UNREADY = 0.5  # seconds between probes of a worker that does not serve
PROBE_READY = 5.0
_PROBE_TIMEOUT = httpx.Timeout(3.0)
_INFO = msgspec.json.Decoder(ServerInfo)


class ProbeFailed(Exception):
    """The worker does not serve now; the text says why."""


class Discovery:
    """`run_static` or `run_registry` is the owner of all tasks; cancelling it ends them."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._client = client
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    async def run_static(self, config: DisaggConfig) -> None:
        async with asyncio.TaskGroup() as group:
            for role, block in (
                (ServerRole.CONTEXT, config.context),
                (ServerRole.GENERATION, config.generation),
            ):
                for host, port in block.urls:
                    self._join(group, Worker(role, host, port))

    async def run_registry(self, membership: Membership) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy_state(membership))
            async for records in membership.watch():
                self.apply(group, records)

    def apply(self, group: asyncio.TaskGroup, records: Iterable[WorkerRecord]) -> None:
        """Make the table hold exactly these workers. One that left takes no new request; its open ones go on."""
        wanted = records_by_id(records)
        for worker in list(self._cluster.workers):
            if wanted.pop(worker.worker_id, None) is None and worker.state is not WorkerState.LEAVING:
                self._leave(group, worker)
        for record in wanted.values():
            self._join(group, Worker(ServerRole(record.role), record.host, record.port, record.worker_id))

    def _join(self, group: asyncio.TaskGroup, worker: Worker) -> None:
        logger.info("%s worker %s joins", worker.role_name, worker.address)
        self._cluster.add(worker)
        self._tasks[worker] = group.create_task(self._tend(worker))

    def _leave(self, group: asyncio.TaskGroup, worker: Worker) -> None:
        self._cluster.set_state(worker, WorkerState.LEAVING, f"deregistered with {worker.active} requests open")
        self._tasks.pop(worker).cancel()
        group.create_task(self._forget_when_idle(worker))

    async def _forget_when_idle(self, worker: Worker) -> None:
        while worker.active:  # noqa: ASYNC110 - an event would have to be set by the hot path, on every request
            await asyncio.sleep(0.1)
        self._cluster.remove(worker)

    async def _copy_state(self, membership: Membership) -> None:
        while True:
            if self._cluster.registry_state != membership.state:
                log = logger.info if membership.state == "up" else logger.warning
                log("registry %s is %s", membership.uri, membership.state)
                self._cluster.registry_state = membership.state
            await asyncio.sleep(0.5)

    async def _tend(self, worker: Worker) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_probing(worker))
            if self._cluster.wants_events(worker):
                group.create_task(follow_events(self._cluster, worker, self._client))

    async def _keep_probing(self, worker: Worker) -> None:
        while True:
            worker.probe_now.clear()
            try:
                await self.probe(worker)
                self._cluster.answers_probe(worker)
            except ProbeFailed as error:
                state = WorkerState.JOINING if worker.state is WorkerState.JOINING else WorkerState.DOWN
                worker.state_reason = str(error)
                self._cluster.set_state(worker, state, str(error))
            try:
                async with asyncio.timeout(PROBE_READY if worker.usable else PROBE_UNREADY):
                    await worker.probe_now.wait()
            except TimeoutError:
                pass

    async def probe(self, worker: Worker) -> None:
        """Ask for /health, and for what the worker is. Raises ProbeFailed."""
        try:
            health = await self._client.get(f"{worker.url}/health", timeout=_PROBE_TIMEOUT)
            if health.status_code != 200:
                raise ProbeFailed(f"/health answers {health.status_code}")
            info = await self._server_info(worker)
            if not worker.usable or info.incarnation != worker.incarnation:
                self._cluster.describe_worker(worker, info, await self._models(worker))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeFailed(f"{type(error).__name__}: {error}") from None

    async def _server_info(self, worker: Worker) -> ServerInfo:
        """Empty for workers of other makes that have no such route."""
        response = await self._client.get(worker.url + SERVER_INFO_PATH, timeout=_PROBE_TIMEOUT)
        if response.status_code == 404:
            return ServerInfo()
        if response.status_code != 200:
            raise ProbeFailed(f"{SERVER_INFO_PATH} answers {response.status_code}")
        try:
            info = _INFO.decode(response.content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProbeFailed(f"{SERVER_INFO_PATH}: {error}") from None
        if info.role is not None and info.role not in (worker.role_name, "aggregated"):
            raise ProbeFailed(f"is a {info.role} worker, configured as {worker.role_name} worker")
        return info

    async def _models(self, worker: Worker) -> list[str]:
        response = await self._client.get(f"{worker.url}/v1/models", timeout=_PROBE_TIMEOUT)
        try:
            data = response.json()["data"] if response.status_code == 200 else []
            return [str(entry["id"]) for entry in data]
        except (ValueError, KeyError, TypeError):
            return []
