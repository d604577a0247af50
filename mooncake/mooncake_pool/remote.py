"""The pool as an engine uses it: `PoolClient`, a BlockStore whose store client lives in another process.

The engine's threads copy blocks to and from segments of their host, or shared staging slots, and wait, at most until
their deadline; whatever the vendor's code does, they get an answer. The pool is a cache: every trouble is a miss, a
counter and a state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncake_pool import wire
from mooncake_pool.access import Access
from mooncake_pool.blockstore import BlockStore, check_call, key_part, key_prefix, scope_of
from mooncake_pool.link import AgentLink, Lane
from mooncake_pool.manifest import Manifest
from mooncake_pool.reading import Reader
from mooncake_pool.staging import StagingArea, slot_stride
from mooncake_pool.store_config import PoolSettings, RunDir, check_settings, effective_settings, store_settings
from mooncake_pool.supervisor import Limits, Supervisor
from mooncake_pool.writing import Writer

__all__ = ["BlockStore", "Limits", "PoolClient", "PoolSettings", "key_prefix"]

log = logging.getLogger("mooncake_pool")

UP = "up"
LANE_BYTES = 128 * 1024 * 1024
"""Most staging memory of one lane, unless four blocks need more."""


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
        config = effective_settings(config)
        check_settings(config, prefix)
        self._config = config
        self._prefix = prefix
        self._incarnation = incarnation
        self._rank = rank
        self._on_state = on_state
        self._told = ""
        self._tell_lock = threading.RLock()
        self._limits = limits
        batch = min(config.transfer_batch_size, max(4, LANE_BYTES // slot_stride(block_bytes)))
        self._access = Access(config.role, block_bytes, batch, self._tell)
        self._reader = Reader(self._access)
        self._writer = Writer(self._access)
        self._run_dir = RunDir.claim(config)
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
        check_call(keys, None, self._access.block_bytes)
        return self._reader.contains(keys, time.monotonic() + timeout)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, into, self._access.block_bytes)
        return self._reader.get(keys, into, time.monotonic() + timeout)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, blocks, self._access.block_bytes)
        return self._writer.put(keys, blocks, time.monotonic() + timeout)

    def state(self) -> str:
        reason, link = self._access.reason, self._access.link
        if reason is None and link is not None and (link.overdue(Lane.READ) or link.overdue(Lane.WRITE)):
            reason = "the store agent is late with an answer"
        return UP if reason is None else f"degraded: {reason}"

    def close(self) -> None:
        self._supervisor.stop()
        self._access.close()
        self._run_dir.release()

    def stats(self) -> dict[str, int]:
        """Counters since start, by what happened to blocks and why.

        Reads: blocks_read, blocks_not_read; of these blocks_read_mapped, and the cause that ended a read: misses,
        blocks_invalid (not, or not yet, what they should be), reads_failed, reads_of_failing_holder.
        Lookups: lookups, lookup_keys, lookup_hits.
        Puts: blocks_stored, blocks_not_stored; of these blocks_written_mapped, blocks_present, and puts_no_space,
        puts_evicted, puts_failed, puts_master_gone, puts_refused, puts_paused (no attempt: a holder failed lately).
        Either: calls_late, calls_refused (pool not usable), calls_master_gone, blocks_forgotten, agents_started.
        """
        return self._access.totals() | {"agents_started": self._supervisor.lives}

    # ---------------------------------------------------------------- supervision

    def _publish(self, link: AgentLink | None, reason: str | None) -> None:
        self._access.link, self._access.reason = link, reason
        self._access.maps.sweep()
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
        self._access.scope = scope_of(prefix)
        store = store_settings(config, manifest)
        self._run_dir.write_config(config, manifest, store)
        run_dir = Path(config.run_dir) if config.run_dir else None

        def request(staging: StagingArea) -> wire.Open:
            return wire.Open(
                store=store,
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
                linger=self._limits.linger,
            )

        return AgentLink.start(request, self._access.value_bytes, 2 * self._access.batch, self._log_path(run_dir))

    def _log_path(self, run_dir: Path | None) -> Path | None:
        return None if run_dir is None else run_dir / f"mooncake_agent.{key_part(self._incarnation)}.log"
