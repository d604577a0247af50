"""What an engine sees of a pool that is not there, not yet there, or not usable."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pool_master import PoolMaster, pool_master, wait_until
from pool_rig import PREFIX, SIZE, Starter, agent_pid, block_of, buffers, cpu_seconds, keys_of, up

from kvstore.errors import SettingsError
from mooncake_pool.manifest import Manifest, write_manifest
from mooncake_pool.net import rdma_devices
from mooncake_pool.remote import PoolClient
from mooncake_pool.store_config import EffectiveSettings

pytestmark = pytest.mark.cluster


def test_nothing_waits_for_a_pool_that_is_not_there(
    tmp_path: Path, start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    client = start(f"file://{tmp_path}/none.json", master_timeout=0.2)
    assert client.state().startswith("degraded: ")
    assert client.get(keys_of(1), buffers(1), 5.0) == 0 and client.put(keys_of(1), [block_of(1)], 5.0) == 0
    assert time.monotonic() - begun < 0.5
    wait_until(lambda: "no pool manifest after 0.2 s" in client.state(), 5, "reason in the state")
    reasons = len(caplog.records)
    time.sleep(1.0)
    assert len(caplog.records) == reasons  # tried again several times, told once
    client.close()
    client.close()
    assert time.monotonic() - begun < 8 and client.stats()["agents_started"] == 0


def test_a_pool_that_comes_later(tmp_path: Path, start: Starter) -> None:
    client = start(f"file://{tmp_path}/pool.json", master_timeout=0.2)
    write_manifest(tmp_path / "pool.json", Manifest("127.0.0.1:9", protocol="tcp"))  # stale: nobody is there
    wait_until(lambda: "no master at 127.0.0.1:9" in client.state(), 5, "reason in the state")
    with pool_master(tmp_path):
        up(client)
        client.close()


def test_a_store_client_that_cannot_be_had_is_told(master: PoolMaster, start: Starter, tmp_path: Path) -> None:
    bad = Manifest(master.manifest().master_server_address, metadata_server="redis://127.0.0.1:1", protocol="tcp")
    write_manifest(tmp_path / "redis.json", bad)
    client = start(f"file://{tmp_path}/redis.json")
    wait_until(lambda: "would abort the process" in client.state(), 10, "reason in the state")


@pytest.mark.skipif(bool(rdma_devices()), reason="this host has RDMA")
def test_rdma_without_a_device_is_no_tcp(tmp_path: Path, start: Starter) -> None:
    with pool_master(tmp_path, protocol="rdma") as master:
        client = start(master.reference)
        wait_until(lambda: "setup over rdma" in client.state(), 25, "reason in the state")
        assert "is an RDMA device active on this host?" in client.state()


def test_a_client_at_rest_costs_nothing(master: PoolMaster, start: Starter) -> None:
    client = up(start(master.reference))
    pid = agent_pid(client)
    before = time.process_time(), cpu_seconds(pid)
    time.sleep(2.0)
    assert time.process_time() - before[0] < 0.2 and cpu_seconds(pid) - before[1] < 0.2


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"role": "reader"}, "mooncake_store.role", "'reader' is not one of both, producer, consumer, capacity"),
        ({"segment_size": 1024}, "mooncake_store.segment_size", "0 or at least 16777216"),
        ({"transfer_batch_size": 0}, "mooncake_store.transfer_batch_size", "less than 1"),
        ({"master_timeout": -1.0}, "mooncake_store.master_timeout", "not positive"),
        ({"pool": "/tmp/pool.json"}, "mooncake_store.pool", "is not host:port; use file://<manifest>"),
    ],
)
def test_bad_settings(options: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        PoolClient.start(EffectiveSettings(**({"pool": "127.0.0.1:1"} | options)), PREFIX, SIZE, "inc")
    assert [path for path, _ in error.value.problems] == [field] and said in str(error.value)


def test_a_prefix_that_keys_cannot_have() -> None:
    with pytest.raises(SettingsError, match=r"mooncake_store\.model_key: 'a,b'"):
        PoolClient.start(EffectiveSettings(pool="127.0.0.1:1"), "a,b", SIZE, "inc")
