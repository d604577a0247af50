"""Where blocks lie, rebuilt from the master's log (allocator lines at verbosity 1). Pure: lines in, tables out.

    initializing_offset_buffer_allocator segment_name=H:P base_address=0x... size=N      a segment of N bytes
    allocation_succeeded size=N segment=H:P address=0x...                                a block placed
    deallocation_succeeded address=0x... size=N segment=H:P                              a block freed
    action=unmount_expired_mem_segment segment_name=H:P                                  a segment whose owner died
    Master service started                                                               nothing placed before counts

Lines are matched one by one: a log that was cut at either end, or is being written, gives what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_LINE = re.compile(
    r"allocation_succeeded size=(?P<placed>\d+) segment=(?P<at>\S+) address=(?P<address>0x[0-9a-f]+)\s*$"
    r"|deallocation_succeeded address=(?P<gone>0x[0-9a-f]+) size=(?P<freed>\d+) segment=(?P<of>\S+)\s*$"
    r"|initializing_offset_buffer_allocator segment_name=(?P<new>\S+) base_address=\S+ size=(?P<capacity>\d+)\s*$"
    r"|action=unmount_expired_mem_segment,? segment_name=(?P<expired>[^\s,]+)"
    r"|(?P<restart>Master service started)"
    r"|\[EVICT-RESULT\] evicted_count=(?P<evicted>\d+)"
    r"|(?P<refused>allocation_failed) size="
)
_WORTH = ("allocation_", "initializing_offset", "unmount_expired", "EVICT-RESULT", "Master service")


@dataclass
class SegmentUse:
    """Bytes and blocks of one segment name. placed = live + freed + lost, as far as the log goes back."""

    name: str
    capacity: int | None = None
    placed_blocks: int = 0
    placed_bytes: int = 0
    freed_blocks: int = 0  # evicted, removed, or taken back after a failed put
    freed_bytes: int = 0
    lost_blocks: int = 0  # went with the segment or with the master
    lost_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    live: dict[str, int] = field(default_factory=dict)  # size by address

    @property
    def live_blocks(self) -> int:
        return len(self.live)

    @property
    def host(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def port(self) -> str:
        return self.name.rpartition(":")[2]

    def place(self, address: str, size: int) -> None:
        self.free(address)  # an address is given out twice only when the log lost a line
        self.live[address] = size
        self.live_bytes += size
        self.placed_blocks += 1
        self.placed_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, address: str) -> bool:
        size = self.live.pop(address, None)
        if size is None:
            return False
        self.live_bytes -= size
        self.freed_blocks += 1
        self.freed_bytes += size
        return True

    def lose_all(self) -> None:
        """The segment is gone, and no line tells it of each block."""
        self.lost_blocks += self.live_blocks
        self.lost_bytes += self.live_bytes
        self.live_bytes = 0
        self.live.clear()


@dataclass
class Placement:
    segments: dict[str, SegmentUse] = field(default_factory=dict)
    master_starts: int = 0
    evicted_keys: int = 0
    refused_allocations: int = 0
    unmatched_frees: int = 0  # of blocks placed before the log begins

    def segment(self, name: str) -> SegmentUse:
        return self.segments.setdefault(name, SegmentUse(name))

    @property
    def placed_blocks(self) -> int:
        return sum(use.placed_blocks for use in self.segments.values())


def parse_placement(lines: Iterable[str]) -> Placement:
    """A last line without line end is still being written and is left out."""
    placement = Placement()
    for line in lines:
        if line.endswith("\n") and any(word in line for word in _WORTH):
            match = _LINE.search(line)
            if match is not None:
                _apply(placement, match)
    return placement


def _apply(placement: Placement, match: re.Match[str]) -> None:
    match match.lastgroup:
        case "address":
            placement.segment(match["at"]).place(match["address"], int(match["placed"]))
        case "of":
            placement.unmatched_frees += not placement.segment(match["of"]).free(match["gone"])
        case "capacity":
            use = placement.segment(match["new"])
            use.lose_all()
            use.capacity = int(match["capacity"])
        case "expired":
            placement.segment(match["expired"]).lose_all()
        case "restart":
            placement.master_starts += 1
            for use in placement.segments.values():
                use.lose_all()
        case "evicted":
            placement.evicted_keys += int(match["evicted"])
        case "refused":
            placement.refused_allocations += 1
