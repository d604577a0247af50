"""The two pictures of the report's page, as inline SVG: occupancy over time and where blocks lie in each segment."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from html import escape

from mooncake_pool.placement import SegmentUse
from mooncake_pool.report import Report, joined

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 260, 84, 24, 10
COLOURS = ("#2a78d6", "#e07b39", "#2f9e6e", "#8a63d2", "#c94f7c", "#b59a1f", "#3aa6b9", "#8c8c8c")
MOST_COLUMNS = 480
CELLS = 96


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def occupancy(report: Report) -> str:
    """Live bytes of every segment, stacked; vertical marks where keys were evicted."""
    stacks = _stacks(report)
    times = _columns(stacks)
    if not times:
        return "<p>The master's log holds no allocation: run the master with <code>mooncake_master</code>.</p>"
    begin, end = times[0], max(times[-1], times[0] + 1)
    values = [[_value_at(use, at) for at in times] for _, use in stacks]
    top = max([report.placement.total.peak_bytes, *(sum(column) for column in zip(*values, strict=True)), 1])
    scale = _Scale(begin, end, top)
    parts = [_grid(scale)]
    below = [0] * len(times)
    for number, row in enumerate(values):
        above = [low + more for low, more in zip(below, row, strict=True)]
        parts.append(f'<path d="{_band(scale, times, below, above)}" fill="{_colour(number)}"/>')
        below = above
    for at, keys in report.placement.evictions:
        x = scale.x(at)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + 8}" class="evict">'
            f"<title>{keys} keys evicted at {_clock(at)}</title></line>"
        )
    legend = "".join(
        f'<span><i style="background:{_colour(number)}"></i>{escape(name)}</span>'
        for number, (name, _) in enumerate(stacks)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="live bytes by segment over time">'
        f'{"".join(parts)}</svg><p class="legend">{legend}<span><i class="evict"></i>eviction</span></p>'
    )


class _Scale:
    def __init__(self, begin: float, end: float, top: int) -> None:
        self.begin, self.end, self.top = begin, end, top

    def x(self, at: float) -> float:
        share = (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return LEFT + share * (WIDTH - LEFT - 8)

    def y(self, size: float) -> float:
        return HEIGHT - BOTTOM - size / self.top * (HEIGHT - BOTTOM - TOP)


def _stacks(report: Report) -> list[tuple[str, SegmentUse]]:
    """The segments that ever held most, and at most as many as there are colours."""
    used = [(name, use) for name, use, _ in joined(report) if len(use.timeline)]
    largest = sorted(used, key=lambda row: -row[1].peak_bytes)[: len(COLOURS)]
    return sorted(largest)


def _columns(stacks: Sequence[tuple[str, SegmentUse]]) -> list[float]:
    times = sorted({at for _, use in stacks for at, _, _ in use.timeline})
    step = -(-len(times) // MOST_COLUMNS) if times else 1
    return times[::step] + (times[-1:] if times and (len(times) - 1) % step else [])


def _value_at(use: SegmentUse, at: float) -> int:
    points = use.timeline.points
    index = bisect.bisect_right(points, at, key=lambda point: point[0]) - 1
    return points[index][1] if index >= 0 else 0


def _band(scale: _Scale, times: Sequence[float], below: Sequence[int], above: Sequence[int]) -> str:
    """A closed outline that goes forth along `above` and back along `below`, in steps."""
    forth = _steps(scale, times, above)
    back = _steps(scale, times, below)[::-1]
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in forth + back) + "Z"


def _steps(scale: _Scale, times: Sequence[float], values: Sequence[int]) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for i, (at, value) in enumerate(zip(times, values, strict=True)):
        until = times[i + 1] if i + 1 < len(times) else scale.end
        points += [(scale.x(at), scale.y(value)), (scale.x(until), scale.y(value))]
    return points


def _grid(scale: _Scale) -> str:
    parts = []
    for quarter in range(5):
        size = scale.top * quarter / 4
        y = scale.y(size)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 8}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{human(size)}</text>'
        )
        at = scale.begin + (scale.end - scale.begin) * quarter / 4
        anchor = "end" if quarter == 4 else "middle" if quarter else "start"
        parts.append(f'<text x="{scale.x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_clock(at)}</text>')
    return "".join(parts)


def placement_map(report: Report) -> str:
    """One row a segment, from its first byte to its last: how full each part is, or was when the segment went."""
    rows: list[str] = []
    for number, (name, use, record) in enumerate(joined(report)):
        capacity = use.capacity or (record.segment_size if record else 0)
        if not capacity:
            continue
        live = use.live or use.last
        when = "now" if use.live or not use.last else "when it went"
        y = 4 + 22 * len(rows)
        rows.append(
            f'<text x="0" y="{y + 12}">{escape(name)}</text>{_cells(use, live, capacity, y, _colour(number))}'
            f'<text x="{WIDTH}" y="{y + 12}" text-anchor="end">'
            f"{human(use.held_bytes)} of {human(capacity)} {when}</text>"
        )
    if not rows:
        return "<p>No segment is known.</p>"
    height = 22 * len(rows) + 8
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="placement map">{"".join(rows)}</svg>'


def _cells(use: SegmentUse, live: dict[str, int], capacity: int, y: int, colour: str) -> str:
    filled = [0.0] * CELLS
    for address, size in live.items():
        start = int(address, 16) - use.base
        if 0 <= start < capacity:
            _spread(filled, start / capacity * CELLS, (start + size) / capacity * CELLS)
    left, width = 200, (WIDTH - 440) / CELLS
    parts = [f'<rect x="{left}" y="{y}" width="{width * CELLS:.1f}" height="16" class="empty"/>']
    for i, share in enumerate(filled):
        if share > 0:
            parts.append(
                f'<rect x="{left + i * width:.1f}" y="{y}" width="{width:.2f}" height="16" fill="{colour}" '
                f'fill-opacity="{min(1.0, 0.15 + 0.85 * share):.2f}"/>'
            )
    return "".join(parts)


def _spread(filled: list[float], start: float, end: float) -> None:
    """Adds to each cell the part of it that start..end covers."""
    for cell in range(int(start), min(len(filled), int(end) + 1)):
        filled[cell] += max(0.0, min(end, cell + 1) - max(start, cell))


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
