"""One worker as the router sees it."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from kvstore.protocol import Fingerprint, ServerInfo, ServerRole, join_address
from router.http_client import ConnectionPool

if TYPE_CHECKING:
    from router.index import WorkerBlocks


class WorkerState(enum.StrEnum):
    JOINING = "joining"  # known, has not answered yet
    READY = "ready"
    DOWN = "down"  # answered before, does not now
    TRIPPED = "tripped"  # answers probes, and failed requests one after another
    TRIAL = "trial"  # was tripped: the next request shows whether it serves again
    LEAVING = "leaving"  # deregistered; requests in flight go on


class Worker:
    """Identity, state and load. `active` counts the legs that it works on now, `active_tokens` their prompt tokens."""

    __slots__ = (
        "active",
        "active_tokens",
        "address",
        "blocks",
        "events_state",
        "failures",
        "host",
        "incarnation",
        "info",
        "last_picked",
        "leg_head",
        "models",
        "pool",
        "port",
        "probe_now",
        "releases",
        "role",
        "state",
        "state_reason",
        "tripped_until",
        "trips",
        "worker_id",
    )

    def __init__(self, role: ServerRole, host: str, port: int, worker_id: str | None = None) -> None:
        self.role = role
        self.host, self.port = host, port
        self.address = join_address(host, port)
        self.worker_id = worker_id or f"{role.name}-{self.address}"
        self.state = WorkerState.JOINING
        self.state_reason = "has not answered yet"
        self.active = 0
        self.active_tokens = 0
        self.last_picked = 0
        self.failures = 0  # of requests in succession
        self.trips = 0  # in succession
        self.tripped_until = 0.0  # monotonic
        self.incarnation: str | None = None
        self.info = ServerInfo()
        self.models: list[str] = []
        self.blocks: WorkerBlocks | None = None
        self.events_state = "off"
        self.releases = True  # False once it answered that it knows no hand-off to release
        self.probe_now = asyncio.Event()
        self.pool = ConnectionPool(host, port, asyncio.get_running_loop())
        self.leg_head = b"x-trtllm-%b-worker: %b\r\n" % (self.role_name.encode(), self.address.encode())

    def __repr__(self) -> str:
        return f"<Worker {self.role_name} {self.address} {self.state} active={self.active}>"

    @property
    def role_name(self) -> str:
        return self.role.name.lower()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def fingerprint(self) -> Fingerprint | None:
        return self.info.fingerprint

    @property
    def usable(self) -> bool:
        return self.state is WorkerState.READY or self.state is WorkerState.TRIAL
