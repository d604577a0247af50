"""The report as text: upstream's lines first, in its order, then what only our records can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mooncake_pool.manifest import LAST_MANIFEST_NAME
from mooncake_pool.placement import SegmentUse
from mooncake_pool.report import PRODUCING, Flow, Report, between_roles, joined
from mooncake_pool.segments import SegmentRecord

GIB = 1024**3


def render(report: Report) -> str:
    lines = [*_manifest_lines(report), *_capacity_lines(report.counted), "", "block placement by segment host:"]
    lines += _placement_lines(report)
    if report.placement.segments or report.records:
        lines += ["", *_occupancy_lines(report)]
    lines += _flow_lines("stored by", "in", report.stored)
    lines += _flow_lines("read by", "from", report.read)
    lines += _count_lines(report)
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
            f"  role {role:<9}: {len(sizes):>3} rank(s), {sum(sizes) / GIB:>8.1f} GiB {percent(sum(sizes), total):>7}"
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
        share = percent(_placed(uses), total)
        lines.append(f"  {host} {role}  pages={pages}  {_placed(uses) / GIB:.2f} GiB  {share}  segments: {ports}")
    lines.append(f"  TOTAL  pages={report.placement.placed_blocks}  {total / GIB:.2f} GiB")
    away = sum(_placed(uses) for host, uses in by_host.items() if not roles.get(host, set()) & PRODUCING)
    lines.append(f"  held off the producing side: {percent(away, total)} ({away / GIB:.1f} GiB)")
    return lines


def _occupancy_lines(report: Report) -> list[str]:
    """The lines above count every block ever placed; these tell what is there and what became of the rest."""
    placement, uses = report.placement, list(report.placement.segments.values())
    ended = Counter(record.ended for record in report.records)
    evicted_blocks, evicted = sum(use.evicted_blocks for use in uses), sum(use.evicted_bytes for use in uses)
    lines = [
        f"live now      : {placement.total.live_blocks} blocks, {placement.total.live_bytes} bytes",
        f"peak          : {placement.total.peak_blocks} blocks, {placement.total.peak_bytes} bytes",
        f"freed         : {sum(use.freed_blocks for use in uses)} blocks, {sum(use.freed_bytes for use in uses)} bytes"
        f" (evicted: {evicted_blocks} blocks, {evicted} bytes; {placement.evicted_keys} keys)",
        f"lost          : {sum(use.lost_blocks for use in uses)} blocks, {sum(use.lost_bytes for use in uses)} bytes"
        " (segment or master gone)",
        f"refused       : {placement.refused_allocations} allocations",
        f"segments      : {len(report.records)} recorded, {len(report.counted)} counted as capacity, "
        f"{ended['closed']} closed, {ended['lost']} lost",
    ]
    lines += [_segment_line(*row) for row in joined(report)]
    for host, level in sorted(placement.hosts.items()):
        lines.append(
            f"  host {host}  live {level.live_blocks} blocks {level.live_bytes} bytes  "
            f"peak {level.peak_blocks} blocks {level.peak_bytes} bytes"
        )
    for record in report.counted:
        if record.protocol_seen and record.protocol_seen != record.protocol:
            lines.append(f"WARNING: {record.segment_name} asked for {record.protocol} and got {record.protocol_seen}")
    return lines


def _segment_line(name: str, use: SegmentUse, record: SegmentRecord | None) -> str:
    capacity = use.capacity if use.capacity is not None else record.segment_size if record else 0
    who = f"{record.role} {record.incarnation} {record.ended or 'mounted'}" if record else "no record"
    return (
        f"  {name}  capacity {capacity}  live {use.live_blocks} blocks {use.live_bytes} bytes  "
        f"peak {use.peak_bytes}  freed {use.freed_bytes}  evicted {use.evicted_bytes}  lost {use.lost_bytes}  {who}"
    )


def _flow_lines(verb: str, preposition: str, flows: Sequence[Flow]) -> list[str]:
    """Who put blocks where, as the ranks counted it."""
    if not flows:
        return []
    total = sum(flow.bytes for flow in flows)
    lines = ["", f"blocks {verb} rank {preposition} segment:"]
    for flow in flows:
        whose = "own" if flow.own else flow.holder_role or "no record"
        lines.append(
            f"  {flow.rank.role} {flow.rank.incarnation} rank {flow.rank.rank}  {preposition} {flow.holder} ({whose})  "
            f"{flow.blocks} blocks  {flow.bytes} bytes  {percent(flow.bytes, total)}"
        )
    for (role, holder), traffic in sorted(between_roles(flows).items()):
        lines.append(f"  {role} -> {holder}: {traffic.blocks} blocks  {percent(traffic.bytes, total)}")
    return lines


def _count_lines(report: Report) -> list[str]:
    counts = report.counts
    lines = []
    if counts:
        asked, there = counts["lookup_keys"], counts["lookup_hits"]
        lines += [
            "",
            f"lookups       : {counts['lookups']} with {asked} keys, {there} present ({percent(there, asked)})",
            f"reads         : {counts['blocks_read']} blocks, {counts['blocks_not_read']} not read "
            f"(misses {counts['misses']}, invalid {counts['blocks_invalid']}, failed {counts['reads_failed']})",
            f"puts          : {counts['blocks_stored']} blocks stored, of these {counts['blocks_present']} were there; "
            f"{counts['blocks_not_stored']} not stored (no space {counts['puts_no_space']}, "
            f"failed {counts['puts_failed']}, late {counts['calls_late']})",
        ]
    if report.samples:
        last = report.samples[-1]
        used = sum(segment.allocator_used_bytes for segment in last.segments)
        evicted = last.metrics.get("master_evicted_size_bytes", 0.0)
        lines.append(
            f"master's word : {len(report.samples)} samples; in the last {used} bytes used in {len(last.segments)} "
            f"segments, {last.metrics.get('master_key_count', 0.0):.0f} keys, {evicted:.0f} bytes evicted so far"
        )
    return lines


def _placed(uses: Sequence[SegmentUse]) -> int:
    return sum(use.placed_bytes for use in uses)


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"
