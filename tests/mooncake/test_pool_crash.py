"""Engines that are killed, in processes of their own, and what the pool and its report say of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_master import PoolMaster, wait_until
from pool_rig import SIZE, Starter, block_of, buffers, keys_of, segment_names, up

from mooncake_pool import segments
from mooncake_pool.report import collect, to_json

pytestmark = pytest.mark.cluster

ENGINE = """
import os, signal, sys, time
from pool_rig import PREFIX, SIZE, block_of, keys_of
from mooncake_pool import writing
from mooncake_pool.remote import Limits, PoolClient
from mooncake_pool.store_config import EffectiveSettings
pool, run_dir, linger, what = sys.argv[1:]
settings = EffectiveSettings(pool=pool, segment_size=16 << 20, run_dir=run_dir)
client = PoolClient.start(settings, PREFIX, SIZE, "engine", limits=Limits(linger=float(linger)))
while client.state() != "up":
    time.sleep(0.01)
print(client._access.link.process.pid, flush=True)
if what == "die in a put":
    writing.write_value = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print(client.put(keys_of(*range(8)), [block_of(i) for i in range(8)], 5.0), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def engine(master: PoolMaster, linger: float, what: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its agent's pid."""
    command = [sys.executable, "-c", ENGINE, master.reference, str(master.run_dir), str(linger), what]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def stored(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}/exe").exists()


def test_blocks_outlive_their_engine_for_a_while(master: PoolMaster, start: Starter) -> None:
    reader = up(start(master.reference, "reader", segment_size=0))
    with engine(master, linger=3.0) as (process, agent):
        assert stored(process) == "8"
        process.kill()
        process.wait()
        into = buffers(8)
        assert reader.get(keys_of(*range(8)), into, 5.0) == 8 and into == [block_of(i) for i in range(8)]
        assert not gone(agent)
        wait_until(lambda: gone(agent), 15, "end of the agent")
    assert reader.get(keys_of(0), buffers(1), 1.0) == 0  # unmounted in order: a miss at once
    assert segment_names(master) == []
    assert [record.ended for record in segments.read_ledger(master.run_dir)[0]] == ["closed"]


def test_an_agent_without_a_master_does_not_linger(master: PoolMaster) -> None:
    with engine(master, linger=50.0) as (process, agent):
        assert stored(process) == "8"
        process.kill()
        master.kill_master()
        wait_until(lambda: gone(agent), 15, "end of the agent")


def test_a_writer_that_dies_in_a_put_leaves_no_key(master: PoolMaster, start: Starter) -> None:
    """Reserved and readable by its name, but never filled."""
    other = up(start(master.reference, "other"))
    with engine(master, linger=30.0, what="die in a put") as (process, agent):
        process.wait(10)
        wait_until(lambda: other.contains(keys_of(0), 1.0) == 0, 10, "reservation taken back")
        assert other.get(keys_of(0), buffers(1), 1.0) == 0
        assert other.put(keys_of(0), [block_of(0)], 5.0) == 1
        into = buffers(1)
        assert other.get(keys_of(0), into, 5.0) == 1 and into == [block_of(0)]
        os.kill(agent, signal.SIGTERM)
        wait_until(lambda: gone(agent), 15, "end of the agent")


def used_bytes(master: PoolMaster) -> dict[str, int]:
    url = f"http://127.0.0.1:{master.manifest().metrics_port}/get_segments_detail"
    with urllib.request.urlopen(url, timeout=2) as answer:
        return {s["segment_name"]: s["allocator_used_bytes"] for s in json.load(answer)["segments"]}


def test_the_report_of_a_run_with_evictions_and_a_killed_rank(master: PoolMaster, start: Starter) -> None:
    client = up(start(master.reference, "survivor", segment_size=16 << 20, run_dir=str(master.run_dir)))
    with engine(master, linger=30.0) as (process, agent):
        assert stored(process) == "8"
        numbers = list(range(100, 190))
        assert client.put(keys_of(*numbers), [block_of(i) for i in numbers], 10.0) > 70
        deadline = time.monotonic() + 20
        while not collect(master.run_dir).placement.evicted_keys and time.monotonic() < deadline:
            numbers = [number + 100 for number in numbers]  # what was stored last is leased for a while
            client.put(keys_of(*numbers[:10]), [block_of(i) for i in numbers[:10]], 5.0)
            time.sleep(0.3)
        wait_until(lambda: client.put(keys_of(1), [block_of(1)], 1.0) == 1, 10, "room for one more")
        assert client.get(keys_of(1), buffers(1), 5.0) == 1
        wait_until(lambda: activity(master, "survivor", "blocks_read") == 1, 10, "counters in the record")
        process.kill()
        os.kill(agent, signal.SIGKILL)
        said = used_bytes(master)
        live = json.loads(to_json(collect(master.run_dir)))
        assert {use["name"]: use["live_bytes"] for use in live["segments"]} == said and len(said) == 2
        assert live["live_bytes"] == sum(said.values()) and live["evicted_keys"] > 0
        assert live["evicted_bytes"] == live["evicted_keys"] * (SIZE + 64)
        wait_until(lambda: len(used_bytes(master)) == 1, 30, "the master gives the dead rank up")
        last = used_bytes(master)
        report = json.loads(to_json(collect(master.run_dir)))
        assert {use["name"]: use["live_bytes"] for use in report["segments"] if use["live_bytes"]} == last
        master.kill_master()
    after = json.loads(to_json(collect(master.run_dir)))  # every process is gone
    assert {use["name"]: use["held_bytes"] for use in after["segments"]} == said | last
    assert after["evicted_bytes"] == report["evicted_bytes"] and after["ranks"] == 2
    flows = {(flow["incarnation"], flow["own"]): flow["blocks"] for flow in after["stored"]}
    assert flows.keys() == {("engine", True), ("engine", False), ("survivor", True), ("survivor", False)}
    assert sum(flow["blocks"] for flow in after["stored"]) == sum(use["placed_blocks"] for use in after["segments"])
    assert sum(flow["blocks"] for flow in after["read"]) == 1 and after["counts"]["blocks_read"] == 1


def activity(master: PoolMaster, incarnation: str, name: str) -> int:
    records, _ = segments.read_ledger(master.run_dir)
    return sum(
        record.activity.counts.get(name, 0)
        for record in records
        if record.incarnation == incarnation and record.activity is not None
    )
