"""The pool as an engine uses it: `PoolClient`, a BlockStore whose store client lives in another process.

The engine's threads copy blocks to and from shared staging slots and wait, at most until their deadline; whatever the
vendor's code does, they get an answer. The pool is a cache: every trouble is a miss, a counter and a state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvstore.errors import SettingsError
from mooncake_pool import wire
from mooncake_pool.blockstore import (
    TRAILER_BYTES,
    BlockStore,
    check_call,
    copy_bytes,
    key_part,
    key_prefix,
    open_value,
    scope_of,
    seal_value,
)
from mooncake_pool.client import MIN_SEGMENT_BYTES, Outcome, StoreSettings
from mooncake_pool.link import AgentLink, Lane, Slots
from mooncake_pool.manifest import Manifest, manifest_of_reference
from mooncake_pool.net import rdma_devices, routed_address
from mooncake_pool.staging import StagingArea, slot_stride
from mooncake_pool.supervisor import Limits, Supervisor

__all__ = ["BlockStore", "Limits", "PoolClient", "PoolSettings", "key_prefix"]

log = logging.getLogger("mooncake_pool")

ROLES = ("both", "producer", "consumer", "capacity")
UP = "up"
LANE_BYTES = 128 * 1024 * 1024
"""Most staging memory of one lane, unless four blocks need more."""


class PoolSettings(Protocol):
    """The `mooncake_store` block, resolved."""

    @property
    def pool(self) -> str: ...
    @property
    def model_key(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def segment_size(self) -> int: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def transfer_batch_size(self) -> int: ...
    @property
    def local_hostname(self) -> str | None: ...
    @property
    def run_dir(self) -> str | None: ...
    @property
    def master_timeout(self) -> float: ...


class PoolClient:
    """Made by `start`; implements BlockStore. Producers put, consumers get, `both` do both, `capacity` only lends."""

    def __init__(
        self,
        config: PoolSettings,
        prefix: str,
        block_bytes: int,
        incarnation: str,
        on_state: Callable[[str], None] | None = None,
        rank: int = 0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        check_settings(config, prefix)
        self._config = config
        self._prefix = prefix
        self._scope = 0
        self._block_bytes = block_bytes
        self._value_bytes = block_bytes + TRAILER_BYTES
        self._incarnation = incarnation
        self._rank = rank
        self._on_state = on_state
        self._batch = min(config.transfer_batch_size, max(4, LANE_BYTES // slot_stride(self._value_bytes)))
        self._link: AgentLink | None = None
        self._reason: str | None = "starting"
        self._told = ""
        self._tell_lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._count_lock = threading.Lock()
        self._supervisor = Supervisor(config.pool, config.master_timeout, self._start_agent, self._publish, limits)

    @classmethod
    def start(
        cls,
        config: PoolSettings,
        key_prefix: str,
        block_bytes: int,
        incarnation: str,
        on_state: Callable[[str], None] | None = None,
        *,
        rank: int = 0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> PoolClient:
        """Returns at once, degraded until master and agent are there; SettingsError for a bad `config`.

        Key text: <namespace>/<key_prefix>/<key in hex>. `on_state` gets each new state(), in order, from any thread;
        it must be quick and not call close().
        """
        client = cls(config, key_prefix, block_bytes, incarnation, on_state, rank, limits)
        client._supervisor.start()
        return client

    # ---------------------------------------------------------------- BlockStore

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        check_call(keys, None, self._block_bytes)
        deadline = time.monotonic() + timeout
        done = 0
        while done < len(keys):
            batch = keys[done : done + self._batch]
            outcomes = self._present(Lane.READ, batch, deadline)
            run = _leading(outcomes)
            done += run
            if run < len(batch):
                break
        return done

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, into, self._block_bytes)
        deadline = time.monotonic() + timeout
        done = 0
        while done < len(keys):
            link = self._usable(Lane.READ)
            if link is None:
                break
            with link.slots(Lane.READ, min(self._batch, len(keys) - done), deadline) as held:
                end = done + len(held)
                run = self._get_batch(link, held, keys[done:end], into[done:end], deadline)
            done += run
            if run == 0 or done < end:
                break
        self._count(blocks_read=done, blocks_not_read=len(keys) - done)
        return done

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, blocks, self._block_bytes)
        deadline = time.monotonic() + timeout
        stored = 0
        for start in range(0, len(keys), self._batch):
            batch = keys[start : start + self._batch]
            present = self._present(Lane.WRITE, batch, deadline)
            if present is None:
                break
            stored += present.count(Outcome.OK)
            missing = [start + i for i, outcome in enumerate(present) if outcome != Outcome.OK]
            stored += self._put_missing(missing, keys, blocks, deadline)
        self._count(blocks_stored=stored, blocks_not_stored=len(keys) - stored)
        return stored

    def state(self) -> str:
        reason, link = self._reason, self._link
        if reason is None and link is not None and (link.overdue(Lane.READ) or link.overdue(Lane.WRITE)):
            reason = "the store agent is late with an answer"
        return UP if reason is None else f"degraded: {reason}"

    def close(self) -> None:
        self._supervisor.stop()

    def stats(self) -> dict[str, int]:
        """Counters since start: blocks_read, blocks_not_read, blocks_stored, blocks_not_stored, blocks_corrupt,
        calls_late, calls_refused (pool not usable), agents_started."""
        with self._count_lock:
            return dict(self._counts) | {"agents_started": self._supervisor.lives}

    # ---------------------------------------------------------------- one batch

    def _get_batch(
        self, link: AgentLink, held: Slots, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float
    ) -> int:
        if not held:
            self._count(calls_late=1)
            return 0
        reply = link.call(Lane.READ, lambda call: wire.Get(call, list(keys), held.numbers), deadline, held)
        if reply is None:
            self._late(link)
            return 0
        for i, key in enumerate(keys):
            if reply.outcomes[i] != Outcome.OK:
                return i
            value = link.staging.value(held.numbers[i])
            block = open_value(value, key, self._scope, reply.lengths[i])
            if block is None:
                self._count(blocks_corrupt=1)
                log.warning("pool block %s failed verification and counts as missing", key.hex())
                return i
            copy_bytes(into[i], block)
        return len(keys)

    def _put_missing(
        self, missing: list[int], keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float
    ) -> int:
        stored = 0
        while missing:
            link = self._usable(Lane.WRITE)
            if link is None:
                break
            with link.slots(Lane.WRITE, len(missing), deadline) as held:
                now, missing = missing[: len(held)], missing[len(held) :]
                if not now:
                    self._count(calls_late=1)
                    break
                for index, slot in zip(now, held.numbers, strict=True):
                    value = link.staging.value(slot)
                    copy_bytes(value[: self._block_bytes], blocks[index])
                    seal_value(value, keys[index], self._scope)
                message_keys = [keys[index] for index in now]
                reply = _send_put(link, message_keys, held, deadline)
                if reply is None:
                    self._late(link)
                    break
                stored += reply.outcomes.count(Outcome.OK)
        return stored

    def _present(self, lane: Lane, keys: Sequence[bytes], deadline: float) -> list[int] | None:
        """An Outcome for each key; None when there is no answer."""
        link = self._usable(lane)
        if link is None:
            return None
        before_put = lane is Lane.WRITE
        reply = link.call(lane, lambda call: wire.Contains(call, list(keys), before_put), deadline)
        if reply is None:
            self._late(link)
            return None
        return None if Outcome.MASTER_GONE in reply.outcomes else reply.outcomes

    def _usable(self, lane: Lane) -> AgentLink | None:
        if self._config.role not in (("both", "consumer") if lane is Lane.READ else ("both", "producer")):
            return None
        link = self._link
        if link is None or self._reason is not None or link.overdue(lane):
            self._count(calls_refused=1)
            return None
        return link

    def _late(self, link: AgentLink) -> None:
        self._count(calls_late=1)
        self._tell()

    def _count(self, **more: int) -> None:
        with self._count_lock:
            self._counts.update(more)

    # ---------------------------------------------------------------- supervision

    def _publish(self, link: AgentLink | None, reason: str | None) -> None:
        self._link, self._reason = link, reason
        self._tell()

    def _tell(self) -> None:
        """Reports the state when it differs from the one reported last."""
        with self._tell_lock:
            state = self.state()
            if state == self._told:
                return
            self._told = state
            log.log(logging.INFO if state == UP else logging.WARNING, "pool %s: %s", self._config.pool, state)
            if self._on_state is not None:
                self._on_state(state)

    def _start_agent(self, manifest: Manifest) -> AgentLink:
        config = self._config
        prefix = f"{key_part(config.namespace or manifest.namespace)}/{self._prefix}"
        self._scope = scope_of(prefix)
        run_dir = Path(config.run_dir) if config.run_dir else None

        def request(staging: StagingArea) -> wire.Open:
            return wire.Open(
                store=store_settings(config, manifest),
                prefix=prefix,
                staging_fd=staging.fd,
                slot_bytes=staging.slot_bytes,
                value_bytes=staging.value_bytes,
                slots=staging.slots,
                run_dir=str(run_dir) if run_dir else None,
                rank=self._rank,
                role=config.role,
                model_key=config.model_key,
                incarnation=self._incarnation,
                metrics_port=manifest.metrics_port,
            )

        return AgentLink.start(request, self._value_bytes, 2 * self._batch, self._log_path(run_dir))

    def _log_path(self, run_dir: Path | None) -> Path | None:
        return None if run_dir is None else run_dir / f"mooncake_agent.{key_part(self._incarnation)}.log"


def _send_put(link: AgentLink, keys: list[bytes], held: Slots, deadline: float) -> wire.Reply | None:
    return link.call(Lane.WRITE, lambda call: wire.Put(call, keys, held.numbers), deadline, held)


def _leading(outcomes: list[int] | None) -> int:
    """How many OK stand first."""
    run = 0
    for outcome in outcomes or ():
        if outcome != Outcome.OK:
            break
        run += 1
    return run


def store_settings(config: PoolSettings, manifest: Manifest) -> StoreSettings:
    host, _ = manifest.master
    return StoreSettings(
        master_address=manifest.master_server_address,
        local_hostname=config.local_hostname or routed_address(host),
        metadata_server=manifest.metadata_server,
        protocol=manifest.protocol,
        devices=",".join(rdma_devices()) if manifest.protocol == "rdma" else "",
        segment_size=config.segment_size,
    )


def check_settings(config: PoolSettings, prefix: str) -> None:
    """SettingsError with everything that is wrong; a pool that is only absent is not."""
    problems = []
    if config.role not in ROLES:
        problems.append(("mooncake_store.role", f"{config.role!r} is not one of {', '.join(ROLES)}"))
    if config.segment_size and config.segment_size < MIN_SEGMENT_BYTES:
        problems.append(
            ("mooncake_store.segment_size", f"{config.segment_size} bytes: 0 or at least {MIN_SEGMENT_BYTES} (16 MiB)")
        )
    if config.transfer_batch_size < 1:
        problems.append(("mooncake_store.transfer_batch_size", f"{config.transfer_batch_size} is less than 1"))
    if not config.master_timeout > 0:
        problems.append(("mooncake_store.master_timeout", f"{config.master_timeout} s is not positive"))
    if not config.pool.startswith("file://"):
        try:
            manifest_of_reference(config.pool)
        except ValueError as error:
            problems.append(("mooncake_store.pool", str(error).removeprefix("mooncake_store.pool: ")))
    if not prefix or prefix != key_part(prefix):
        problems.append(
            ("mooncake_store.model_key", f"{prefix!r} is empty or has characters that a pool key cannot have")
        )
    if problems:
        raise SettingsError(problems)
