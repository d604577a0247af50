"""A real master and real store clients on loopback, driven as an engine drives them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from pool_master import PoolMaster, pool_master, wait_until
from pool_rig import MIB, PREFIX, SIZE, Starter, agent_pid, block_of, buffers, keys_of, segment_names, up

from mooncake_pool import segments
from mooncake_pool.client import StoreHandle
from mooncake_pool.remote import Limits, PoolClient
from mooncake_pool.report import collect
from mooncake_pool.store_config import EffectiveSettings, store_settings

pytestmark = pytest.mark.cluster


def test_put_by_one_and_get_by_another(master: PoolMaster, start: Starter) -> None:
    states: list[str] = []
    run_dir = str(master.run_dir)
    config = EffectiveSettings(pool=master.reference, segment_size=32 * MIB, run_dir=run_dir, model_key="tiny")
    one = PoolClient.start(config, PREFIX, SIZE, "one", states.append)
    two = up(start(master.reference, "two", run_dir=run_dir, transfer_batch_size=5))
    try:
        up(one)
        keys, blocks = keys_of(*range(12)), [block_of(i) for i in range(12)]
        assert one.put(keys, blocks, 10.0) == 12
        assert one.put(keys, blocks, 10.0) == 12  # already there
        assert two.contains([*keys_of(0, 1), *keys_of(99), *keys_of(2)], 10.0) == 2
        into = buffers(12)
        assert two.get(keys, into, 10.0) == 12 and into == blocks
        into = buffers(3)
        assert two.get(keys_of(0, 99, 1), into, 10.0) == 1
        assert into[0] == block_of(0) and bytes(into[2]) == bytes(SIZE)
        stats = one.stats()
        assert (stats["blocks_stored"], stats["blocks_not_stored"], stats["agents_started"]) == (24, 0, 1)
        assert (stats["blocks_written_mapped"], stats["blocks_present"]) == (12, 12)
        assert two.stats()["blocks_read_mapped"] == 13
        records, problems = segments.read_ledger(master.run_dir)
        assert sorted(r.segment_name for r in records) == segment_names(master) and problems == []
        record = next(r for r in records if r.incarnation == "one")
        assert (record.role, record.segment_size, record.model_key, record.rank) == ("both", 32 * MIB, "tiny", 0)
        assert (record.protocol, record.protocol_seen, record.live) == ("tcp", "tcp", True)
        assert_report_is_exact(master)
    finally:
        one.close()
    assert states[-1] == "degraded: closed" and "up" in states
    assert one.get(keys, buffers(12), 1.0) == 0
    ended = {r.incarnation: r.ended for r in segments.read_ledger(master.run_dir)[0]}
    assert ended == {"one": "closed", "two": ""}
    assert len(segment_names(master)) == 1  # no ghost


def assert_report_is_exact(master: PoolMaster) -> None:
    """Bytes rebuilt from the log against what the master itself says, while the job is live."""
    url = f"http://127.0.0.1:{master.manifest().metrics_port}/get_segments_detail"
    with urllib.request.urlopen(url, timeout=2) as answer:
        said = {s["segment_name"]: s["allocator_used_bytes"] for s in json.load(answer)["segments"]}
    report = collect(master.run_dir)
    ours = {name: use.live_bytes for name, use in report.placement.segments.items()}
    assert ours == said and sum(ours.values()) == 12 * (SIZE + 64)
    assert len(report.counted) == 2 and report.manifest == master.manifest()


def test_clients_that_share_no_memory(master: PoolMaster, start: Starter) -> None:
    """As on different hosts: everything goes through slots and the vendor's transport."""
    one, two = up(start(master.reference, "one")), up(start(master.reference, "two", transfer_batch_size=5))
    for client in (one, two):
        client._access.maps.close()
    keys, blocks = keys_of(*range(12)), [block_of(i) for i in range(12)]
    assert one.put(keys, blocks, 10.0) == 12 and one.put(keys, blocks, 10.0) == 12
    into = buffers(12)
    assert two.get(keys, into, 10.0) == 12 and into == blocks
    assert one.stats()["blocks_written_mapped"] == 0
    assert two.stats().get("blocks_read_mapped", 0) == 0 and two.stats()["blocks_read"] == 12
    placed = one._access.link.activity.snapshot().put_to if one._access.link is not None else {}
    assert sum(traffic.blocks for traffic in placed.values()) == 12


def test_roles(master: PoolMaster, start: Starter) -> None:
    producer = up(start(master.reference, role="producer"))
    consumer = up(start(master.reference, role="consumer", segment_size=0))
    capacity = up(start(master.reference, role="capacity"))
    key, into = keys_of(1), buffers(1)
    assert producer.put(key, [block_of(1)], 5.0) == 1 and producer.get(key, into, 5.0) == 0
    assert consumer.get(key, into, 5.0) == 1 and consumer.put(keys_of(2), [block_of(2)], 5.0) == 0
    assert capacity.contains(key, 5.0) == 0 and capacity.put(key, into, 5.0) == 0


def test_bytes_that_are_not_the_block_are_a_miss(master: PoolMaster, start: Starter) -> None:
    """Stored by a foreign client under our keys: a bad trailer, a wrong length, another key's value."""
    client = up(start(master.reference))
    settings = store_settings(EffectiveSettings(pool=master.reference, segment_size=0), master.manifest())
    value = (ctypes.c_char * (SIZE + 4096))()
    store = StoreHandle.open(settings)
    try:
        store.register(ctypes.addressof(value), len(value))
        for number, size in ((7, SIZE + 64), (8, SIZE + 4096), (9, 100)):
            name = f"trtllm/{PREFIX}/{keys_of(number)[0].hex()}"
            assert store.put_from([name], [ctypes.addressof(value)], size) == [0]
    finally:
        store.close()
    into = buffers(2)
    assert client.put(keys_of(1), [block_of(1)], 5.0) == 1
    for number in (7, 8, 9):
        assert client.contains(keys_of(1, number), 5.0) == 2
        assert client.get(keys_of(1, number), into, 5.0) == 1
        assert into[0] == block_of(1) and bytes(into[1]) == bytes(SIZE)
    assert client.stats()["blocks_invalid"] == 3


def test_a_full_pool_skips(master: PoolMaster, start: Starter) -> None:
    client = up(start(master.reference, segment_size=16 * MIB))
    keys, blocks = keys_of(*range(80)), [block_of(i) for i in range(80)]
    assert client.put(keys[:40], blocks[:40], 10.0) == 40
    assert client.get(keys[:40], buffers(40), 10.0) == 40  # leased: cannot be evicted
    stored = client.put(keys, blocks, 10.0)
    assert 40 <= stored < 80 and client.state() == "up"
    assert client.get(keys[:40], buffers(40), 10.0) == 40


def test_the_master_dies_and_comes_back(tmp_path: Path, start: Starter) -> None:
    with pool_master(tmp_path) as first:
        ports = {"rpc_port": first.manifest().master[1], "metrics_port": first.manifest().metrics_port}
        one, two = up(start(first.reference, "one")), up(start(first.reference, "two"))
        keys, blocks = keys_of(1, 2), [block_of(1), block_of(2)]
        assert one.put(keys, blocks, 5.0) == 2
        first.kill_master()
        begun = time.monotonic()
        assert two.get(keys, buffers(2), 0.5) == 0
        assert time.monotonic() - begun < 1.0
        wait_until(lambda: one.state() != "up" and two.state() != "up", 5, "clients notice")
        begun = time.monotonic()
        assert one.put(keys, blocks, 5.0) == 0 and two.contains(keys, 5.0) == 0
        assert time.monotonic() - begun < 0.1  # degraded answers at once
    with pool_master(tmp_path, **ports):
        begun = time.monotonic()
        into = buffers(2)
        wait_until(lambda: one.put(keys, blocks, 2.0) == 2 and two.get(keys, into, 2.0) == 2, 10, "pool works again")
        print(f"pool usable {time.monotonic() - begun:.2f} s after the master was back")
        assert into == blocks
        assert one.stats()["agents_started"] == 1


def test_a_master_that_comes_back_elsewhere(tmp_path: Path, start: Starter) -> None:
    with pool_master(tmp_path) as first:
        client = up(start(first.reference))
        first.kill_master()
    with pool_master(tmp_path) as second:
        wait_until(lambda: client.put(keys_of(1), [block_of(1)], 2.0) == 1, 15, "pool works again")
        assert len(segment_names(second)) == 1


def test_an_agent_that_dies_is_replaced(master: PoolMaster, start: Starter) -> None:
    client = up(start(master.reference, run_dir=str(master.run_dir)))
    old = agent_pid(client)
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: client.state() != "up", 5, "client notices")
    up(client)
    assert agent_pid(client) != old and client.stats()["agents_started"] == 2
    records, _ = segments.read_ledger(master.run_dir)
    assert sorted(record.ended for record in records) == ["", "lost"]
    assert len(collect(master.run_dir).counted) == 1


def test_an_agent_that_hangs_is_replaced(master: PoolMaster, start: Starter) -> None:
    client = up(start(master.reference, limits=Limits(silence=1.0, stuck=1.0)))
    assert client.put(keys_of(1), [block_of(1)], 5.0) == 1
    old = agent_pid(client)
    os.kill(old, signal.SIGSTOP)
    begun = time.monotonic()
    assert client.get(keys_of(1), buffers(1), 0.3) == 0
    assert time.monotonic() - begun < 1.0
    assert client.state() == "degraded: the store agent is late with an answer"
    assert client.get(keys_of(1), buffers(1), 5.0) == 0 and time.monotonic() - begun < 1.0
    wait_until(lambda: not Path(f"/proc/{old}/exe").exists(), 10, "end of the hung agent")
    up(client)


def test_a_late_answer_gives_the_lane_back(master: PoolMaster, start: Starter) -> None:
    """Slots of a call that was given up come back when the agent answers after all, and nothing else happens."""
    client = up(start(master.reference))
    keys, blocks = keys_of(*range(8)), [block_of(i) for i in range(8)]
    assert client.put(keys, blocks, 5.0) == 8
    link = client._access.link
    assert link is not None
    free = {lane: len(slots) for lane, slots in link._free.items()}
    os.kill(link.process.pid, signal.SIGSTOP)
    assert client.get(keys, buffers(8), 0.1) == 0
    os.kill(link.process.pid, signal.SIGCONT)
    up(client)
    into = buffers(8)
    assert client.get(keys, into, 5.0) == 8 and into == blocks
    assert {lane: len(slots) for lane, slots in link._free.items()} == free
    assert client.stats()["agents_started"] == 1 and client.stats()["calls_late"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_agent(master: PoolMaster, start: Starter, number: signal.Signals) -> None:
    client = up(start(master.reference, run_dir=str(master.run_dir)))
    old = agent_pid(client)
    os.kill(old, number)
    if number == signal.SIGINT:  # a terminal sends it to the whole group; the engine decides
        assert client.put(keys_of(1), [block_of(1)], 5.0) == 1 and agent_pid(client) == old
        return
    wait_until(lambda: client.stats()["agents_started"] == 2, 10, "replacement")
    records, _ = segments.read_ledger(master.run_dir)
    assert records[0].ended == "closed"


def test_twenty_restarts_leave_one_segment(master: PoolMaster, start: Starter) -> None:
    for number in range(20):
        client = up(start(master.reference, f"inc{number}", run_dir=str(master.run_dir), segment_size=16 * MIB))
        if number < 19:
            os.kill(agent_pid(client), signal.SIGKILL)  # so that close need not unmount
            wait_until(lambda: client.state() != "up", 5, "client notices")  # noqa: B023
            client.close()
    report = collect(master.run_dir)
    assert [record.incarnation for record in report.counted] == ["inc19"]


def test_a_holder_that_is_killed_stalls_nobody(master: PoolMaster, start: Starter) -> None:
    """For the seconds in which the master still names it."""
    holder = up(start(master.reference, "holder"))
    reader = up(start(master.reference, "reader", segment_size=0))
    stranger = up(start(master.reference, "stranger", segment_size=0))
    keys, blocks = keys_of(*range(8)), [block_of(i) for i in range(8)]
    assert holder.put(keys, blocks, 5.0) == 8 and reader.get(keys, buffers(8), 5.0) == 8
    os.kill(agent_pid(holder), signal.SIGKILL)
    begun = time.monotonic()
    into = buffers(8)
    assert reader.get(keys, into, 5.0) == 8 and into == blocks  # what it has mapped is still there
    for _ in range(10):
        assert stranger.get(keys, buffers(8), 5.0) == 0
    assert time.monotonic() - begun < 3.0
    assert stranger.stats()["reads_of_failing_holder"] >= 8 and stranger.state() == "up"


def test_many_threads(master: PoolMaster, start: Starter) -> None:
    """Few slots, several threads of both kinds: nobody gets another's bytes."""
    client = up(start(master.reference, transfer_batch_size=4))
    wrong: list[str] = []

    def work(number: int) -> None:
        names = range(100 * number, 100 * number + 10)
        for _ in range(3):
            into = buffers(10)
            stored = client.put(keys_of(*names), [block_of(i) for i in names], 10.0)
            loaded = client.get(keys_of(*names), into, 10.0)
            if (stored, loaded) != (10, 10) or into != [block_of(i) for i in names]:
                wrong.append(f"thread {number}: stored {stored}, loaded {loaded}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and client.state() == "up"


def test_an_agent_that_is_never_ready_is_replaced(master: PoolMaster, start: Starter) -> None:
    client = start(master.reference, limits=Limits(start=0.01))
    wait_until(lambda: client.stats()["agents_started"] >= 2, 10, "second agent")
    wait_until(lambda: "not ready after 0.01 s" in client.state(), 10, "reason in the state")
