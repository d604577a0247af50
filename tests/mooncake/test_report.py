from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner

from mooncake_pool import segments
from mooncake_pool.manifest import Manifest, write_manifest
from mooncake_pool.report import collect, to_json
from mooncake_pool.report_html import page
from mooncake_pool.report_text import render
from mooncake_pool.samples import Sample, SegmentSample
from mooncake_pool.segments import Activity, SegmentRecord, Traffic
from trtllm_serve.mooncake import mooncake_pool_report

GIB = 1024**3
EPOCH = 1.8e9
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
        "tcp", "", EPOCH + started, stopped and EPOCH + stopped, "" if stopped is None else "closed",
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


def test_of_two_records_of_a_rank_the_newest_counts(tmp_path: Path) -> None:
    """Upstream's form, as a crashed and restarted job leaves it."""
    for name, size, age in (("r0", GIB, 100.0), ("r0-b", 2 * GIB, 10.0), ("r2", GIB, 5.0)):
        content = {"host": "h", "rank": int(name[1]), "segment_size": size, "role": "both", "model_key": "m"}
        path = tmp_path / "segments" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        os.utime(path, (EPOCH - age, EPOCH - age))
    (tmp_path / "segments" / "r1.json").write_text('{"host": "h", "ra')
    report = collect(tmp_path)
    assert len(report.records) == 3 and sum(record.segment_size for record in report.counted) == 3 * GIB
    truncated, old, missing = report.problems
    assert "r1.json" in truncated and "r0.json: rank 0 of h has a newer record, r0-b.json" in old
    assert missing.startswith("rank 1 of 3 has no record (both m, ")


def test_workers_of_equal_rank_are_not_duplicates(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, None)
    our_record(tmp_path, 2, 5.0, None)
    report = collect(tmp_path)
    assert len(report.counted) == 2 and report.problems == []


def with_activity(folder: Path) -> None:
    """A producer that stored in its own segment, in a lender's and in one that nobody recorded."""
    our_record(folder, 1, 0.0, None)
    our_record(folder, 2, 0.0, None)
    for number, role, ports in ((1, "producer", [100, 101]), (2, "capacity", [200, 201])):
        path = segments.record_path(folder, "127.0.0.1", number)
        record = segments.read_record(path)
        record.role, record.ports = role, ports
        if role == "producer":
            placed = {"127.0.0.1:101": Traffic(3, 300), "127.0.0.1:200": Traffic(6, 600), "10.0.0.9:7": Traffic(1, 100)}
            counts = {"lookups": 2, "lookup_keys": 10, "lookup_hits": 4, "blocks_stored": 10, "blocks_present": 1}
            record.activity = Activity(counts, placed, {"127.0.0.1:200": Traffic(4, 400)})
        segments.write_record(path, record)


def test_from_producer_to_holder(tmp_path: Path) -> None:
    with_activity(tmp_path)
    text = render(collect(tmp_path))
    assert "producer inc1 rank 0  in 127.0.0.1:13001 (own)  3 blocks  300 bytes  30.0%" in text
    assert "producer inc1 rank 0  in 127.0.0.1:13002 (capacity)  6 blocks  600 bytes  60.0%" in text
    assert "producer inc1 rank 0  in 10.0.0.9:7 (no record)  1 blocks  100 bytes  10.0%" in text
    assert "producer -> capacity: 6 blocks  60.0%" in text and "producer -> own: 3 blocks  30.0%" in text
    assert "blocks read by rank from segment:" in text and "producer -> capacity: 4 blocks  100.0%" in text
    assert "lookups       : 2 with 10 keys, 4 present (40.0%)" in text


def test_endpoints_that_only_the_master_could_name(tmp_path: Path) -> None:
    with_activity(tmp_path)
    sample = Sample(EPOCH, [SegmentSample("10.0.0.9:1", "10.0.0.9:7", 64, 32)], {"master_key_count": 5.0})
    (tmp_path / "pool.samples.jsonl").write_bytes(msgspec.json.encode(sample) + b"\n")
    text = render(collect(tmp_path))
    assert "in 10.0.0.9:1 (no record)" in text
    assert "master's word : 1 samples; in the last 32 bytes used in 1 segments, 5 keys, 0 bytes evicted so far" in text


def test_a_segment_that_nobody_recorded_is_named(tmp_path: Path) -> None:
    our_record(tmp_path, 1, 0.0, None)
    (tmp_path / "mooncake_master.log").write_text(line("127.0.0.1:13001", 10, 1) + line("10.0.0.9:1", 10, 1))
    assert collect(tmp_path).problems == ["segment 10.0.0.9:1 is in the master's log, but no rank has recorded it"]


class Checker(HTMLParser):
    """Every element that is opened is closed, and nothing is loaded from elsewhere."""

    VOID = ("meta", "line", "rect", "path", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in self.VOID or (tag == "line" and ("class", "evict") in attrs):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page(tmp_path: Path) -> None:
    with_activity(tmp_path)
    log = f"{HEAD}initializing_offset_buffer_allocator segment_name=127.0.0.1:13001 base_address=0x0 size=1000\n"
    log += "".join(line("127.0.0.1:13001", 100, address) for address in range(0, 900, 100))
    log += HEAD.replace("48", "58") + "[EVICT-RESULT] evicted_count=2, eviction_base=63\n"
    log += line("<b>&:1", 7, 1)
    (tmp_path / "mooncake_master.log").write_text(log)
    html = page(collect(tmp_path))
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and checker.seen["svg"] == 2 and checker.seen["table"] >= 6
    assert "<b>&:1" not in html and "&lt;b&gt;&amp;:1" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_page_of_nothing(tmp_path: Path) -> None:
    html = page(collect(tmp_path))
    assert "holds no allocation" in html and "No segment is known" in html


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


def test_as_json(tmp_path: Path) -> None:
    upstream_record(tmp_path, "h", 0, GIB, "both")
    run = CliRunner().invoke(mooncake_pool_report, ["--run_dir", str(tmp_path), "--json"])
    assert json.loads(run.stdout)["capacity_bytes"] == GIB


def test_a_page_is_written_beside_the_text(tmp_path: Path) -> None:
    upstream_record(tmp_path, "h", 0, GIB, "both")
    command = ["--run_dir", str(tmp_path), "--html"]
    run = CliRunner().invoke(mooncake_pool_report, [*command, str(tmp_path / "r.html")])
    assert run.exit_code == 0 and run.stdout.startswith("master        : unknown")
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    run = CliRunner().invoke(mooncake_pool_report, [*command, str(tmp_path / "no" / "r.html")])
    assert run.exit_code == 1 and "r.html: No such file or directory" in run.output


@pytest.mark.parametrize("arguments", [[], ["--run_dir", "/", "--bogus"], ["--run_dir", "/none/such"]])
def test_usage_errors(arguments: list[str]) -> None:
    run = CliRunner().invoke(mooncake_pool_report, arguments)
    assert run.exit_code == 2 and (not arguments or arguments[-1] in run.output)


def test_a_directory_without_a_pool_is_a_usage_error(tmp_path: Path) -> None:
    run = CliRunner().invoke(mooncake_pool_report, ["--run_dir", str(tmp_path)])
    assert run.exit_code == 2 and "no pool.json" in run.output


def test_a_read_only_run_dir(tmp_path: Path) -> None:
    with_activity(tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    assert len(collect(tmp_path).records) == 2
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before
