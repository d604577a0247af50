from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_master import PoolMaster, pool_master
from pool_rig import MIB, PREFIX, SIZE, Starter

from mooncake_pool.remote import Limits, PoolClient
from mooncake_pool.store_config import EffectiveSettings


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts clients that are gone at the end; not closed in order, which takes seconds (tests of closing do it)."""
    clients: list[PoolClient] = []

    def starter(reference: str, incarnation: str = "inc", limits: Limits | None = None, **options: Any) -> PoolClient:
        options = {"segment_size": 32 * MIB, "master_timeout": 20.0} | options
        client = PoolClient.start(
            EffectiveSettings(pool=reference, **options), PREFIX, SIZE, incarnation, limits=limits or Limits()
        )
        clients.append(client)
        return client

    yield starter
    for client in clients:
        if client._access.link is not None:
            client._access.link.process.kill()
        client.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[PoolMaster]:
    with pool_master(tmp_path) as running:
        yield running
