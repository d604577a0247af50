from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mooncake_pool import segments
from mooncake_pool.manifest import Manifest, write_manifest
from mooncake_pool.report import collect, render, to_json
from mooncake_pool.segments import SegmentRecord

GIB = 1024**3
HEAD = "I1130 11:12:48.767220  7245 allocator.cpp:353] "
REPORT = [sys.executable, "-c", "from trtllm_serve.mooncake import mooncake_pool_report as main; main()"]


def line(segment: str, size: int, address: int) -> str:
    return f"{HEAD}allocation_succeeded size={size} segment={segment} address={address:#x}\n"


def upstream_record(folder: Path, host: str, rank: int, size: int, role: str) -> None:
    """The five fields that a rank of TensorRT-LLM writes."""
    path = folder / "segments" / f"segment-{host}-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"host": host, "rank": rank, "segment_size": size, "role": role, "model_key": "m"}
    path.write_text(json.dumps(content))


def test_upstreams_text(tmp_path: Path) -> None:
    write_manifest(tmp_path / "pool.json", Manifest("10.0.0.5:50051"))
    for rank in range(4):
        upstream_record(tmp_path / "ctx", "10.0.0.5", rank, 160 * GIB, "both")
        upstream_record(tmp_path / "gen", "10.0.0.6", rank, 160 * GIB, "capacity")
    log = line("10.0.0.5:12345", GIB, 1) + line("10.0.0.5:12346", 2 * GIB, 1) + line("10.0.0.6:12400", GIB, 1)
    (tmp_path / "mooncake_master.log").write_text(log)
    text = render(collect(tmp_path))
    upstream, _, ours = text.partition("\n\nlive now")
    assert upstream == (
        "master        : 10.0.0.5:50051\n"
        "transport     : rdma\n"
        "metadata      : P2PHANDSHAKE\n"
        "ranks         : 8 across 2 host(s)\n"
        "capacity      : 1280.0 GiB\n"
        "  role both     :   4 rank(s),    640.0 GiB   50.0%\n"
        "  role capacity :   4 rank(s),    640.0 GiB   50.0%\n"
        "per rank      : 160.0 GiB, uniform\n"
        "\n"
        "block placement by segment host:\n"
        "  10.0.0.5 both  pages=2  3.00 GiB  75.0%  segments: 12345,12346\n"
        "  10.0.0.6 capacity  pages=1  1.00 GiB  25.0%  segments: 12400\n"
        "  TOTAL  pages=3  4.00 GiB\n"
        "  held off the producing side: 25.0% (1.0 GiB)"
    )
    assert f"      : 3 blocks, {4 * GIB} bytes" in ours


def test_nothing_there(tmp_path: Path) -> None:
    text = render(collect(tmp_path))
    assert text.splitlines()[:2] == [
        f"master        : unknown ({tmp_path}/pool.json: No such file or directory)",
        "capacity      : nothing recorded. No rank mounted a segment, or none was given this run_dir.",
    ]
    assert text.endswith("(no allocations in the master log)")
    missing = render(collect(tmp_path, tmp_path / "other.log"))
    assert f"(master log at {tmp_path}/other.log could not be read: No such file or directory)" in missing


def test_after_the_job_the_last_manifest_answers(tmp_path: Path) -> None:
    write_manifest(tmp_path / "pool.last.json", Manifest("10.0.0.5:50051", protocol="tcp"))
    assert render(collect(tmp_path)).startswith("master        : 10.0.0.5:50051 (withdrawn)\ntransport     : tcp\n")


def test_sizes_that_differ(tmp_path: Path) -> None:
    for rank, size in enumerate((GIB, GIB, 2 * GIB)):
        upstream_record(tmp_path, "h", rank, size, "both")
    assert "per rank      : NOT UNIFORM. 2 distinct sizes (2 x 1.0 GiB, 1 x 2.0 GiB)" in render(collect(tmp_path))


def test_unreadable_records_are_told_and_the_rest_counts(tmp_path: Path) -> None:
    upstream_record(tmp_path, "h", 0, GIB, "both")
    (tmp_path / "segments" / "segment-h-9.json").write_text('{"host": "h"')
    (tmp_path / "segments" / "segment-h-8.json").write_text('{"host": "h"}')
    report = collect(tmp_path)
    assert len(report.problems) == 2 and all("segment-h-" in problem for problem in report.problems)
    assert len(report.counted) == 1


def our_record(folder: Path, number: int, started: float, stopped: float | None, size: int = GIB) -> None:
    record = SegmentRecord(
        "127.0.0.1", 0, size, "both", "m", number, 1, "machine", f"inc{number}", f"127.0.0.1:{13000 + number}",
        "tcp", "", started, stopped, "" if stopped is None else "closed",
    )  # fmt: skip
    segments.write_record(segments.record_path(folder, record.host, number), record)


def test_twenty_restarts_are_one_segment(tmp_path: Path) -> None:
    for number in range(20):
        our_record(tmp_path, number, 10.0 * number, 10.0 * number + 9)
    our_record(tmp_path, 20, 200.0, None)
    report = collect(tmp_path)
    assert [record.incarnation for record in report.counted] == ["inc20"]
    assert "ranks         : 1 across 1 host(s)" in render(report)
    assert "segments      : 21 recorded, 1 counted as capacity, 20 closed, 0 lost" in render(report)


def test_capacity_is_the_largest_moment(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, 10.0)
    our_record(tmp_path, 2, 5.0, 20.0)  # with 1: 2 GiB
    our_record(tmp_path, 3, 15.0, None, size=GIB // 2)
    report = collect(tmp_path)
    assert {record.pid for record in report.counted} == {1, 2}


def test_blocks_of_a_segment_that_was_unmounted_are_not_live(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, 10.0)
    our_record(tmp_path, 2, 0.0, None)
    log = line("127.0.0.1:13001", 100, 1) + line("127.0.0.1:13002", 10, 1)
    (tmp_path / "mooncake_master.log").write_text(log)
    content = json.loads(to_json(collect(tmp_path)))
    assert (content["live_bytes"], content["live_blocks"]) == (10, 1)
    assert {use["name"]: use["lost_bytes"] for use in content["segments"]} == {
        "127.0.0.1:13001": 100,
        "127.0.0.1:13002": 0,
    }


def test_another_transport_than_asked_for_is_told(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, None)
    path = segments.record_path(tmp_path, "127.0.0.1", 1)
    record = segments.read_record(path)
    record.protocol, record.protocol_seen = "rdma", "tcp"
    segments.write_record(path, record)
    assert "WARNING: 127.0.0.1:13001 asked for rdma and got tcp" in render(collect(tmp_path))


# ---------------------------------------------------------------- the ledger


def test_a_record_ends_once(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, None)
    path = segments.record_path(tmp_path, "127.0.0.1", 1)
    segments.mark_stopped(path, "closed")
    segments.mark_stopped(path, "lost")
    assert segments.read_record(path).ended == "closed"
    segments.mark_stopped(tmp_path / "none.json", "lost")


def test_the_dead_are_swept_by_the_next_that_starts(tmp_path: Path) -> None:
    ours = segments.new_record("h", 0, GIB, "both", "m", "inc", "h:1", "tcp")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = msgspec.structs.replace(ours, pid=child.pid, pid_start=5)
    reused = msgspec.structs.replace(ours, pid_start=ours.pid_start + 1)
    elsewhere = msgspec.structs.replace(dead, machine="another boot")
    for name, record in (("ours", ours), ("dead", dead), ("reused", reused), ("elsewhere", elsewhere)):
        segments.write_record(tmp_path / "segments" / f"{name}.json", record)
    assert segments.sweep_dead(tmp_path) == 2
    ended = {path.stem: segments.read_record(path).ended for path in (tmp_path / "segments").iterdir()}
    assert ended == {"ours": "", "dead": "lost", "reused": "lost", "elsewhere": ""}


def test_a_process_knows_its_start() -> None:
    assert segments.start_ticks(os.getpid()) and segments.this_machine()
    assert segments.start_ticks(2**22 + 1) is None


# ---------------------------------------------------------------- the command


def test_command(tmp_path: Path) -> None:
    upstream_record(tmp_path, "h", 0, GIB, "both")
    (tmp_path / "segments" / "segment-h-9.json").write_text("{")
    run = subprocess.run([*REPORT, "--run_dir", tmp_path], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and "capacity      : 1.0 GiB" in run.stdout
    assert run.stderr.startswith("warning: ") and "segment-h-9.json" in run.stderr
    run = subprocess.run([*REPORT, "--run_dir", tmp_path, "--json"], capture_output=True, text=True, timeout=30)
    assert json.loads(run.stdout)["capacity_bytes"] == GIB


@pytest.mark.parametrize("arguments", [[], ["--run_dir", "/", "--bogus"]])
def test_usage_errors(arguments: list[str]) -> None:
    assert subprocess.run([*REPORT, *arguments], capture_output=True, timeout=30).returncode == 2
