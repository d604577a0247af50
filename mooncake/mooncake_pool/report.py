"""What there is to say about a run's pool: its files read, joined and counted. Rendered by report_text and report_html.

pool.json | pool.last.json   manifest            segments/*.json      what each rank lent and did
mooncake_master.log          placement           pool.samples.jsonl   the master's own word over time
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mooncake_pool.manifest import LAST_MANIFEST_NAME, MANIFEST_NAME, Manifest, read_manifest
from mooncake_pool.master import LOG_NAME
from mooncake_pool.placement import Level, Placement, SegmentUse, parse_placement
from mooncake_pool.samples import Sample, read_samples
from mooncake_pool.segments import SegmentRecord, Traffic, largest_moment, missing_ranks, read_ledger, superseded

PRODUCING = {"both", "producer"}


@dataclass
class Flow:
    """Blocks that one rank stored in, or read from, a segment."""

    rank: SegmentRecord
    holder: str  # segment name, or the endpoint where it could not be told
    holder_role: str  # "" when no record names the holder
    blocks: int
    bytes: int

    @property
    def own(self) -> bool:
        return self.holder == self.rank.segment_name


@dataclass
class Report:
    run_dir: str
    manifest: Manifest | None = None
    manifest_source: str = ""  # pool.json, or pool.last.json after the master has gone
    manifest_error: str = ""
    records: list[SegmentRecord] = field(default_factory=list)
    counted: list[SegmentRecord] = field(default_factory=list)  # mounted together when the pool was largest
    placement: Placement = field(default_factory=Placement)
    placement_error: str = ""
    has_log: bool = False
    samples: list[Sample] = field(default_factory=list)
    stored: list[Flow] = field(default_factory=list)
    read: list[Flow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of all ranks' store clients
    problems: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing of a pool was found."""
        return not (self.manifest or self.records or self.has_log or self.samples)


def collect(run_dir: Path, master_log: Path | None = None) -> Report:
    """Reads what there is; whatever is missing or broken is told in the report."""
    report = Report(str(run_dir))
    _collect_manifest(report, run_dir)
    report.records, report.problems = read_ledger(run_dir)
    report.counted = largest_moment(report.records)
    report.samples, problems = read_samples(run_dir)
    report.problems += problems
    _collect_placement(report, master_log or run_dir / LOG_NAME, asked_for=master_log is not None)
    _retire(report)
    _collect_activity(report)
    _name_gaps(report)
    return report


def _collect_manifest(report: Report, run_dir: Path) -> None:
    for name in (MANIFEST_NAME, LAST_MANIFEST_NAME):
        try:
            report.manifest = read_manifest(run_dir / name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{run_dir / name}: ")
            report.manifest_error = report.manifest_error or f"{run_dir / name}: {reason}"
        else:
            report.manifest_source = name
            return


def _collect_placement(report: Report, path: Path, asked_for: bool) -> None:
    report.has_log = path.exists()
    if not report.has_log and not asked_for:
        return
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
            report.placement = parse_placement(lines, path.stat().st_mtime)
    except OSError as error:
        report.placement_error = f"(master log at {path} could not be read: {error.strerror or error})"


def _retire(report: Report) -> None:
    """A segment that was unmounted in order leaves no line in the log; its record tells."""
    in_order = sorted(report.records, key=lambda record: record.started)
    last = {record.segment_name: record for record in in_order if record.segment_name}
    placement = report.placement
    for name, record in last.items():
        if record.stopped is not None and name in placement.segments:
            placement.now = max(placement.now, float(int(record.stopped)))
            placement.lose_all(placement.segments[name])


def _collect_activity(report: Report) -> None:
    names = _names_of_endpoints(report)
    roles = {record.segment_name: record.role for record in report.records if record.segment_name}
    for record in report.records:
        if record.activity is not None:
            report.counts.update(record.activity.counts)
            report.stored += _flows(record, record.activity.put_to, names, roles)
            report.read += _flows(record, record.activity.got_from, names, roles)


def _flows(
    rank: SegmentRecord, table: dict[str, Traffic], names: dict[str, str], roles: dict[str, str]
) -> Iterable[Flow]:
    for endpoint, traffic in sorted(table.items()):
        holder = names.get(endpoint, endpoint)
        yield Flow(rank, holder, roles.get(holder, ""), traffic.blocks, traffic.bytes)


def _names_of_endpoints(report: Report) -> dict[str, str]:
    """Segment name by the endpoint in descriptors, from the ranks' own records and from what the master said."""
    names = {
        segment.te_endpoint: segment.segment_name
        for sample in report.samples
        for segment in sample.segments
        if segment.te_endpoint
    }
    for record in report.records:
        for port in record.ports:
            if record.segment_name:
                names.setdefault(f"{record.host}:{port}", record.segment_name)
    return names


def _name_gaps(report: Report) -> None:
    for old, new in superseded(report.records):
        report.problems.append(f"{old.file}: rank {old.rank} of {old.host} has a newer record, {Path(new.file).name}")
    report.problems += missing_ranks(report.records)
    known = {record.segment_name for record in report.records}
    if any(known):  # upstream's records name no segment
        for name, use in sorted(report.placement.segments.items()):
            if name not in known and use.placed_blocks:
                report.problems.append(f"segment {name} is in the master's log, but no rank has recorded it")


def joined(report: Report) -> list[tuple[str, SegmentUse, SegmentRecord | None]]:
    """Every segment by name, with what the log and its last record say of it."""
    by_name = {record.segment_name: record for record in report.records if record.segment_name}
    names = sorted({*by_name, *report.placement.segments})
    return [(name, report.placement.segments.get(name) or SegmentUse(name=name), by_name.get(name)) for name in names]


def between_roles(flows: Iterable[Flow]) -> dict[tuple[str, str], Traffic]:
    """Traffic by (role of the rank, role of the holder); a rank's own segment is "own"."""
    table: dict[tuple[str, str], Traffic] = {}
    for flow in flows:
        holder = "own" if flow.own else flow.holder_role or "unknown"
        traffic = table.setdefault((flow.rank.role, holder), Traffic())
        traffic.blocks += flow.blocks
        traffic.bytes += flow.bytes
    return table


# ---------------------------------------------------------------- JSON


def to_json(report: Report) -> str:
    """Sizes in bytes, times in Unix seconds."""
    placement = report.placement
    content = {
        "run_dir": report.run_dir,
        "manifest": msgspec.to_builtins(report.manifest),
        "manifest_source": report.manifest_source,
        "capacity_bytes": sum(record.segment_size for record in report.counted),
        "ranks": len(report.counted),
        "counted": [record.segment_name for record in report.counted],
        "records": msgspec.to_builtins(report.records),
        "segments": [_segment_json(use) for use in placement.segments.values()],
        "hosts": {host: _level_json(level) for host, level in placement.hosts.items()},
        **_level_json(placement.total),
        "evictions": [list(each) for each in placement.evictions],
        "evicted_keys": placement.evicted_keys,
        "evicted_bytes": sum(use.evicted_bytes for use in placement.segments.values()),
        "refused_allocations": placement.refused_allocations,
        "master_starts": placement.master_starts,
        "stored": [_flow_json(flow) for flow in report.stored],
        "read": [_flow_json(flow) for flow in report.read],
        "counts": dict(report.counts),
        "samples": len(report.samples),
        "last_sample": msgspec.to_builtins(report.samples[-1]) if report.samples else None,
        "placement_error": report.placement_error,
        "problems": report.problems,
    }
    return json.dumps(content, indent=2, sort_keys=True)


def _level_json(level: Level) -> dict[str, Any]:
    return {name: getattr(level, name) for name in ("live_bytes", "live_blocks", "peak_bytes", "peak_blocks")}


def _segment_json(use: SegmentUse) -> dict[str, Any]:
    names = ("placed", "freed", "evicted", "lost")
    counts = {f"{name}_{unit}": getattr(use, f"{name}_{unit}") for name in names for unit in ("bytes", "blocks")}
    points = [{"time": at, "bytes": live, "most": most} for at, live, most in use.timeline]
    return {
        "name": use.name,
        "capacity": use.capacity,
        "held_bytes": use.held_bytes,
        **_level_json(use),
        **counts,
        "over_time": points,
    }


def _flow_json(flow: Flow) -> dict[str, Any]:
    return {
        "rank": flow.rank.rank,
        "host": flow.rank.host,
        "role": flow.rank.role,
        "incarnation": flow.rank.incarnation,
        "segment": flow.rank.segment_name,
        "holder": flow.holder,
        "holder_role": flow.holder_role,
        "own": flow.own,
        "blocks": flow.blocks,
        "bytes": flow.bytes,
    }
