"""Where blocks lay and when, rebuilt from the master's log (allocator lines at verbosity 1). Pure: lines to tables.

    initializing_offset_buffer_allocator segment_name=H:P base_address=0x... size=N      a segment of N bytes
    allocation_succeeded size=N segment=H:P address=0x...                                a block placed
    deallocation_succeeded address=0x... size=N segment=H:P                              a block freed
    [EVICT-TRIGGER] ... [EVICT-RESULT] evicted_count=N    what the same thread frees in between was evicted
    segment_name=H:P, action=unmount_expired_mem_segment                                 a segment whose owner died
    Master service started                                                               nothing placed before counts

Lines are matched one by one: a log that was cut at either end, or is being written, gives what it holds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from mooncake_pool.timeline import Timeline

_LINE = re.compile(
    r"allocation_succeeded size=(?P<placed>\d+) segment=(?P<at>\S+) address=(?P<address>0x[0-9a-f]+)\s*$"
    r"|deallocation_succeeded address=(?P<gone>0x[0-9a-f]+) size=(?P<freed>\d+) segment=(?P<of>\S+)\s*$"
    r"|initializing_offset_buffer_allocator segment_name=(?P<new>\S+) base_address=(?P<base>\S+)"
    r" size=(?P<capacity>\d+)\s*$"
    r"|segment_name=(?P<expired>[^\s,]+), action=unmount_expired_mem_segment"
    r"|(?P<restart>Master service started)"
    r"|(?P<trigger>\[EVICT-TRIGGER\])"
    r"|\[EVICT-RESULT\] evicted_count=(?P<evicted>\d+)"
    r"|(?P<refused>allocation_failed) size="
)
_HEAD = re.compile(r"[IWEF](\d{4}) (\d\d:\d\d:\d\d)\.\d+ +(\d+) ")
_WORTH = ("allocation_", "initializing_offset", "unmount_expired", "EVICT-", "Master service")


@dataclass
class Level:
    """Bytes and blocks that lie somewhere now, and the most that ever did."""

    live_bytes: int = 0
    live_blocks: int = 0
    peak_bytes: int = 0
    peak_blocks: int = 0

    def change(self, more_bytes: int, more_blocks: int) -> None:
        self.live_bytes += more_bytes
        self.live_blocks += more_blocks
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_blocks = max(self.peak_blocks, self.live_blocks)


@dataclass
class SegmentUse(Level):
    """Bytes and blocks of one segment name. placed = live + freed + lost, as far as the log goes back."""

    name: str = ""
    capacity: int | None = None
    placed_blocks: int = 0
    placed_bytes: int = 0
    freed_blocks: int = 0  # evicted, removed, or taken back after a failed put
    freed_bytes: int = 0
    evicted_blocks: int = 0  # of the freed
    evicted_bytes: int = 0
    lost_blocks: int = 0  # went with the segment or with the master
    lost_bytes: int = 0
    base: int = 0  # address of its first byte
    live: dict[str, int] = field(default_factory=dict)  # size by address
    last: dict[str, int] = field(default_factory=dict)  # what was live when the segment went
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def held_bytes(self) -> int:
        """Live bytes, or those that were live when the segment went."""
        return sum((self.live or self.last).values())

    @property
    def host(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def port(self) -> str:
        return self.name.rpartition(":")[2]


@dataclass
class Placement:
    segments: dict[str, SegmentUse] = field(default_factory=dict)
    hosts: dict[str, Level] = field(default_factory=dict)
    total: Level = field(default_factory=Level)
    timeline: Timeline = field(default_factory=Timeline)  # of the total
    evictions: list[tuple[float, int]] = field(default_factory=list)  # Unix second, keys
    master_starts: int = 0
    evicted_keys: int = 0
    refused_allocations: int = 0
    unmatched_frees: int = 0  # of blocks placed before the log begins
    now: float = 0.0  # Unix time of the line read last

    def segment(self, name: str) -> SegmentUse:
        if name not in self.segments:
            self.segments[name] = SegmentUse(name=name)
        return self.segments[name]

    @property
    def placed_blocks(self) -> int:
        return sum(use.placed_blocks for use in self.segments.values())

    def place(self, use: SegmentUse, address: str, size: int) -> None:
        self.free(use, address)  # an address is given out twice only when the log lost a line
        use.live[address] = size
        use.placed_blocks += 1
        use.placed_bytes += size
        self._change(use, size, 1)

    def free(self, use: SegmentUse, address: str) -> int | None:
        """Bytes freed; None for an address that holds nothing."""
        size = use.live.pop(address, None)
        if size is not None:
            use.freed_blocks += 1
            use.freed_bytes += size
            self._change(use, -size, -1)
        return size

    def lose_all(self, use: SegmentUse) -> None:
        """The segment is gone, and no line tells it of each block."""
        use.lost_blocks += use.live_blocks
        use.lost_bytes += use.live_bytes
        if use.live:
            use.last, use.live = use.live, {}
        self._change(use, -use.live_bytes, -use.live_blocks)

    def _change(self, use: SegmentUse, more_bytes: int, more_blocks: int) -> None:
        if not more_blocks:
            return
        for level in (use, self.hosts.setdefault(use.host, Level()), self.total):
            level.change(more_bytes, more_blocks)
        use.timeline.note(self.now, use.live_bytes)
        self.timeline.note(self.now, self.total.live_bytes)


def parse_placement(lines: Iterable[str], about: float | None = None) -> Placement:
    """A last line without line end is still being written and is left out.

    Log lines have no year: `about` is a Unix time within half a year of them, default now.
    """
    parser = _Parser(time.time() if about is None else about)
    for line in lines:
        if line.endswith("\n") and any(word in line for word in _WORTH):
            match = _LINE.search(line)
            if match is not None:
                parser.apply(match, _HEAD.match(line))
    return parser.placement


class _Parser:
    def __init__(self, about: float) -> None:
        self.placement = Placement()
        self._about = about
        self._second = ("", "")
        self._evicting: dict[str, list[tuple[SegmentUse, int]]] = {}  # by thread

    def apply(self, match: re.Match[str], head: re.Match[str] | None) -> None:
        placement = self.placement
        thread = head[3] if head is not None else ""
        if head is not None and (head[1], head[2]) != self._second:
            self._second = (head[1], head[2])
            placement.now = unix_time(head[1], head[2], self._about)
        match match.lastgroup:
            case "address":
                placement.place(placement.segment(match["at"]), match["address"], int(match["placed"]))
            case "of":
                self._free(placement.segment(match["of"]), match["gone"], thread)
            case "capacity":
                use = placement.segment(match["new"])
                placement.lose_all(use)
                use.capacity, use.base = int(match["capacity"]), _address(match["base"])
            case "expired":
                placement.lose_all(placement.segment(match["expired"]))
            case "restart":
                placement.master_starts += 1
                self._evicting.clear()
                for use in placement.segments.values():
                    placement.lose_all(use)
            case "trigger":
                self._evicting[thread] = []
            case "evicted":
                self._evicted(int(match["evicted"]), thread)
            case "refused":
                placement.refused_allocations += 1

    def _free(self, use: SegmentUse, address: str, thread: str) -> None:
        size = self.placement.free(use, address)
        if size is None:
            self.placement.unmatched_frees += 1
        elif thread in self._evicting:
            self._evicting[thread].append((use, size))

    def _evicted(self, keys: int, thread: str) -> None:
        self.placement.evicted_keys += keys
        for use, size in self._evicting.pop(thread, ()):
            use.evicted_blocks += 1
            use.evicted_bytes += size
        evictions = self.placement.evictions
        if not keys:
            return
        if evictions and (evictions[-1][0] == self.placement.now or len(evictions) >= Timeline.MOST):
            keys += evictions.pop()[1]
        evictions.append((self.placement.now, keys))


def _address(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0


def unix_time(month_day: str, clock: str, about: float) -> float:
    """Of a glog time (MMDD, HH:MM:SS, local) in the year that brings it closest to `about`; 0 for no such day."""
    year = time.localtime(about).tm_year
    best = 0.0
    for candidate in (year - 1, year, year + 1):
        try:
            moment = time.mktime(time.strptime(f"{candidate}{month_day} {clock}", "%Y%m%d %H:%M:%S"))
        except ValueError:  # 29 February of another year, or no date at all
            continue
        if not best or abs(moment - about) < abs(best - about):
            best = moment
    return best
