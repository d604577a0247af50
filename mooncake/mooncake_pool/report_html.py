"""The report as one self-contained page: no script, no font, no address outside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mooncake_pool.report import Flow, Report, between_roles, joined
from mooncake_pool.report_svg import human, occupancy, placement_map
from mooncake_pool.report_text import percent, render

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--dim:#6b7075;--line:#d9dce0;--paper:#fff;--cell:#eef0f2}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--dim:#9aa0a6;--line:#3a3f45;--paper:#16181b;--cell:#24282d}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:24px auto;max-width:1000px;
padding:0 16px}h1{font-size:20px;margin:0}h2{font-size:15px;margin:28px 0 8px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}.tile{border:1px solid var(--line);border-radius:6px;
padding:8px 14px;min-width:120px}.tile b{display:block;font-size:18px}.tile span,.legend,p{color:var(--dim)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:3px 10px 3px 0;
border-bottom:1px solid var(--line);white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--dim);font-weight:500}th.t,td.t{text-align:left}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}.grid{stroke:var(--line)}.evict{stroke:#c62828;stroke-width:2}
.empty{fill:var(--cell)}.legend span{margin-right:16px}.legend i{display:inline-block;width:10px;height:10px;
margin-right:5px;border-radius:2px}.legend i.evict{background:#c62828}pre{overflow-x:auto;font-size:12px}
"""


def page(report: Report) -> str:
    """The whole HTML document."""
    sections = [
        ("Occupancy over time", occupancy(report)),
        ("Placement map", placement_map(report)),
        ("Segments", _segments(report)),
        ("Hosts", _hosts(report)),
        ("Blocks stored: rank to holder", _flows(report.stored)),
        ("Blocks read: rank from holder", _flows(report.read)),
        ("What the ranks counted", _counts(report)),
        ("Warnings", _list(report.problems)),
        ("As text", f"<pre>{escape(render(report))}</pre>"),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Mooncake pool report</title>'
        f"<style>{_STYLE}</style></head><body><h1>Mooncake pool</h1><p>{escape(_headline(report))}</p>"
        f"{_tiles(report)}{body}</body></html>\n"
    )


def _headline(report: Report) -> str:
    manifest = report.manifest
    if manifest is None:
        return f"master unknown; {report.run_dir}"
    return (
        f"{manifest.master_server_address} over {manifest.protocol}, namespace {manifest.namespace}; {report.run_dir}"
    )


def _tiles(report: Report) -> str:
    total, uses = report.placement.total, report.placement.segments.values()
    asked, there = report.counts["lookup_keys"], report.counts["lookup_hits"]
    tiles = [
        ("ranks", str(len(report.counted))),
        ("capacity", human(sum(record.segment_size for record in report.counted))),
        ("live now", human(total.live_bytes)),
        ("peak", human(total.peak_bytes)),
        ("evicted", human(sum(use.evicted_bytes for use in uses))),
        ("lost", human(sum(use.lost_bytes for use in uses))),
        ("lookups present", percent(there, asked) if asked else "no lookups"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for n, v in tiles)
        + "</div>"
    )


def _segments(report: Report) -> str:
    rows = []
    for name, use, record in joined(report):
        capacity = use.capacity if use.capacity is not None else record.segment_size if record else 0
        who = (record.role, record.incarnation, record.ended or "mounted") if record else ("", "no record", "")
        sizes = (use.live_bytes, use.peak_bytes, use.placed_bytes, use.evicted_bytes, use.freed_bytes, use.lost_bytes)
        rows.append((name, *who, human(capacity), use.live_blocks, *sizes))
    head = ("segment", "role", "incarnation", "state", "capacity", "live blocks", "live bytes", "peak", "placed",
            "evicted", "freed", "lost")  # fmt: skip
    return _table(head, rows, texts=4)


def _hosts(report: Report) -> str:
    rows = [
        (host, level.live_blocks, level.live_bytes, level.peak_blocks, level.peak_bytes)
        for host, level in sorted(report.placement.hosts.items())
    ]
    return _table(("host", "live blocks", "live bytes", "peak blocks", "peak bytes"), rows, texts=1)


def _flows(flows: Sequence[Flow]) -> str:
    if not flows:
        return ""
    total = sum(flow.bytes for flow in flows)
    rows = [
        (
            f"{flow.rank.role} {flow.rank.incarnation} rank {flow.rank.rank}",
            flow.holder,
            "own" if flow.own else flow.holder_role or "no record",
            flow.blocks,
            flow.bytes,
            percent(flow.bytes, total),
        )
        for flow in flows
    ]
    roles = [
        (role, holder, traffic.blocks, traffic.bytes, percent(traffic.bytes, total))
        for (role, holder), traffic in sorted(between_roles(flows).items())
    ]
    return _table(("rank", "holder", "is", "blocks", "bytes", "share"), rows, texts=3) + _table(
        ("role", "holder", "blocks", "bytes", "share"), roles, texts=2
    )


def _counts(report: Report) -> str:
    return _table(("what", "count"), sorted(report.counts.items()), texts=1)


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], texts: int) -> str:
    """The first `texts` columns are left-aligned. Empty without rows."""
    if not rows:
        return ""

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(f"<{tag}{' class=t' if i < texts else ''}>{_shown(cell)}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'


def _shown(cell: object) -> str:
    return f"{cell:,}".replace(",", "\u202f") if isinstance(cell, int) else escape(str(cell))
