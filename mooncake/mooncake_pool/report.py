"""What `mooncake_pool_report` says: upstream's lines first, in its order, then what only our records can tell."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mooncake_pool.manifest import LAST_MANIFEST_NAME, MANIFEST_NAME, Manifest, read_manifest
from mooncake_pool.master import LOG_NAME
from mooncake_pool.placement import Placement, SegmentUse, parse_placement
from mooncake_pool.segments import SegmentRecord, largest_moment, read_ledger

GIB = 1024**3
PRODUCING = {"both", "producer"}


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
    problems: list[str] = field(default_factory=list)


def collect(run_dir: Path, master_log: Path | None = None) -> Report:
    """Reads what there is; whatever is missing or broken is told in the report."""
    report = Report(str(run_dir))
    _collect_manifest(report, run_dir)
    report.records, report.problems = read_ledger(run_dir)
    report.counted = largest_moment(report.records)
    log_path = master_log or run_dir / LOG_NAME
    if master_log is not None or log_path.exists():
        try:
            with open(log_path, encoding="utf-8", errors="replace", newline="\n") as lines:
                report.placement = parse_placement(lines)
        except OSError as error:
            report.placement_error = f"(master log at {log_path} could not be read: {error.strerror or error})"
    _retire(report)
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


def _retire(report: Report) -> None:
    """A segment that was unmounted in order leaves no line in the log; its record tells."""
    in_order = sorted(report.records, key=lambda record: record.started)
    last = {record.segment_name: record for record in in_order if record.segment_name}
    for name, record in last.items():
        if not record.live and name in report.placement.segments:
            report.placement.segments[name].lose_all()


# ---------------------------------------------------------------- text


def render(report: Report) -> str:
    lines = [*_manifest_lines(report), *_capacity_lines(report.counted), "", "block placement by segment host:"]
    lines += _placement_lines(report)
    lines += _segment_lines(report)
    return "\n".join(lines)


def _manifest_lines(report: Report) -> list[str]:
    manifest = report.manifest
    if manifest is None:
        return [f"master        : unknown ({report.manifest_error})"]
    withdrawn = report.manifest_source == LAST_MANIFEST_NAME
    return [
        f"master        : {manifest.master_server_address}" + (" (withdrawn)" if withdrawn else ""),
        f"transport     : {manifest.protocol}",
        f"metadata      : {manifest.metadata_server}",
    ]


def _capacity_lines(records: Sequence[SegmentRecord]) -> list[str]:
    if not records:
        return ["capacity      : nothing recorded. No rank mounted a segment, or none was given this run_dir."]
    total = sum(record.segment_size for record in records)
    hosts = len({record.host for record in records})
    lines = [f"ranks         : {len(records)} across {hosts} host(s)", f"capacity      : {total / GIB:.1f} GiB"]
    for role in sorted({record.role for record in records}):
        sizes = [record.segment_size for record in records if record.role == role]
        lines.append(
            f"  role {role:<9}: {len(sizes):>3} rank(s), {sum(sizes) / GIB:>8.1f} GiB {_percent(sum(sizes), total):>7}"
        )
    sizes_seen = Counter(record.segment_size for record in records)
    if len(sizes_seen) == 1:
        lines.append(f"per rank      : {total / len(records) / GIB:.1f} GiB, uniform")
    else:
        each = ", ".join(f"{count} x {size / GIB:.1f} GiB" for size, count in sorted(sizes_seen.items()))
        lines.append(f"per rank      : NOT UNIFORM. {len(sizes_seen)} distinct sizes ({each})")
    return lines


def _placement_lines(report: Report) -> list[str]:
    if report.placement_error:
        return [f"  {report.placement_error}"]
    used = [use for use in report.placement.segments.values() if use.placed_blocks]
    if not used:
        return ["  (no allocations in the master log)"]
    roles: dict[str, set[str]] = {}
    for record in report.records:
        roles.setdefault(record.host, set()).add(record.role)
    by_host: dict[str, list[SegmentUse]] = {}
    for use in used:
        by_host.setdefault(use.host, []).append(use)
    total = sum(use.placed_bytes for use in used)
    lines = []
    for host, uses in sorted(by_host.items(), key=lambda item: -_placed(item[1])):
        role = "+".join(sorted(roles.get(host, ()))) or "unknown"
        ports = ",".join(sorted({use.port for use in uses}))
        pages = sum(use.placed_blocks for use in uses)
        share = _percent(_placed(uses), total)
        lines.append(f"  {host} {role}  pages={pages}  {_placed(uses) / GIB:.2f} GiB  {share}  segments: {ports}")
    lines.append(f"  TOTAL  pages={report.placement.placed_blocks}  {total / GIB:.2f} GiB")
    away = sum(_placed(uses) for host, uses in by_host.items() if not roles.get(host, set()) & PRODUCING)
    lines.append(f"  held off the producing side: {_percent(away, total)} ({away / GIB:.1f} GiB)")
    return lines


def _segment_lines(report: Report) -> list[str]:
    """Ours: the lines above count every block ever placed; these tell what is there."""
    placement = report.placement
    if not placement.segments and not report.records:
        return []
    uses = list(placement.segments.values())
    ended = sum(record.ended == "closed" for record in report.records)
    lost = sum(record.ended == "lost" for record in report.records)
    lines = [
        "",
        f"live now      : {sum(use.live_blocks for use in uses)} blocks, {sum(use.live_bytes for use in uses)} bytes",
        f"freed         : {sum(use.freed_blocks for use in uses)} blocks, {sum(use.freed_bytes for use in uses)} bytes"
        f" (evictions: {placement.evicted_keys} keys)",
        f"lost          : {sum(use.lost_blocks for use in uses)} blocks, {sum(use.lost_bytes for use in uses)} bytes"
        " (segment or master gone)",
        f"refused       : {placement.refused_allocations} allocations",
        f"segments      : {len(report.records)} recorded, {len(report.counted)} counted as capacity, "
        f"{ended} closed, {lost} lost",
    ]
    lines += [_segment_line(name, placement.segments.get(name), record) for name, record in _joined(report)]
    for record in report.counted:
        if record.protocol_seen and record.protocol_seen != record.protocol:
            lines.append(f"WARNING: {record.segment_name} asked for {record.protocol} and got {record.protocol_seen}")
    return lines


def _joined(report: Report) -> list[tuple[str, SegmentRecord | None]]:
    by_name = {record.segment_name: record for record in report.records if record.segment_name}
    names = sorted({*by_name, *report.placement.segments})
    return [(name, by_name.get(name)) for name in names]


def _segment_line(name: str, use: SegmentUse | None, record: SegmentRecord | None) -> str:
    use = use or SegmentUse(name)
    capacity = use.capacity if use.capacity is not None else record.segment_size if record else 0
    who = f"{record.role} {record.incarnation} {record.ended or 'mounted'}" if record else "no record"
    return (
        f"  {name}  capacity {capacity}  live {use.live_blocks} blocks {use.live_bytes} bytes  "
        f"peak {use.peak_bytes}  freed {use.freed_bytes}  lost {use.lost_bytes}  {who}"
    )


def _placed(uses: Sequence[SegmentUse]) -> int:
    return sum(use.placed_bytes for use in uses)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


# ---------------------------------------------------------------- JSON


def to_json(report: Report) -> str:
    """Sizes in bytes, times in Unix seconds."""
    placement = report.placement
    segments: list[dict[str, Any]] = []
    for use in placement.segments.values():
        entry = asdict(use)
        del entry["live"]
        segments.append(entry | {"live_blocks": use.live_blocks})
    content = {
        "run_dir": report.run_dir,
        "manifest": msgspec.to_builtins(report.manifest),
        "manifest_source": report.manifest_source,
        "capacity_bytes": sum(record.segment_size for record in report.counted),
        "ranks": len(report.counted),
        "counted": [record.segment_name for record in report.counted],
        "records": msgspec.to_builtins(report.records),
        "segments": segments,
        "live_bytes": sum(use.live_bytes for use in placement.segments.values()),
        "live_blocks": sum(use.live_blocks for use in placement.segments.values()),
        "evicted_keys": placement.evicted_keys,
        "refused_allocations": placement.refused_allocations,
        "master_starts": placement.master_starts,
        "placement_error": report.placement_error,
        "problems": report.problems,
    }
    return json.dumps(content, indent=2, sort_keys=True)
