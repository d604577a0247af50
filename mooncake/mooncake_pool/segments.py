"""The ledger of what each rank lent to the pool: one JSON file a store client, under run_dir/segments/.

The first five fields are upstream's. Records outlive the processes that wrote them: `stopped` is set by the process
itself, by its engine, or by the next one that starts on the machine and finds it dead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncake_pool.manifest import write_atomically

FOLDER = "segments"


class Traffic(msgspec.Struct):
    blocks: int = 0
    bytes: int = 0


class Activity(msgspec.Struct):
    """What one store client did. Holders are named by the endpoint in the pool's descriptors."""

    counts: dict[str, int] = {}
    put_to: dict[str, Traffic] = {}
    got_from: dict[str, Traffic] = {}


class SegmentRecord(msgspec.Struct):
    host: str  # the address by which the pool knows the rank
    rank: int
    segment_size: int  # bytes
    role: str = "both"
    model_key: str = ""
    pid: int = 0
    pid_start: int = 0  # clock ticks since boot; tells a reused pid apart
    machine: str = ""  # boot and pid namespace in which `pid` means something
    incarnation: str = ""
    segment_name: str = ""  # host:port in the master's log
    protocol: str = ""  # asked for
    protocol_seen: str = ""  # of a block that this rank stored; "" when none was looked up
    started: float = 0.0  # Unix time
    stopped: float | None = None
    ended: str = ""  # "closed", or "lost": its process died without unmounting
    ports: list[int] = []  # on which its process listens: one of them is that of its endpoint
    activity: Activity | None = None  # as of a few seconds before the end, at worst
    file: str = ""  # where it was read; set by read_ledger

    @property
    def live(self) -> bool:
        return self.stopped is None


def record_path(run_dir: Path, host: str, pid: int) -> Path:
    return run_dir / FOLDER / f"segment-{re.sub(r'[^0-9A-Za-z.-]', '_', host)}-{pid}.json"


def new_record(
    host: str,
    rank: int,
    segment_size: int,
    role: str,
    model_key: str,
    incarnation: str,
    segment_name: str,
    protocol: str,
    ports: Sequence[int] = (),
) -> SegmentRecord:
    """Record of the calling process, started now."""
    pid = os.getpid()
    return SegmentRecord(
        host=host,
        rank=rank,
        segment_size=segment_size,
        role=role,
        model_key=model_key,
        pid=pid,
        pid_start=start_ticks(pid) or 0,
        machine=this_machine(),
        incarnation=incarnation,
        segment_name=segment_name,
        protocol=protocol,
        started=time.time(),
        ports=list(ports),
    )


def write_record(path: Path, record: SegmentRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n")


def read_record(path: Path) -> SegmentRecord:
    """OSError, or ValueError that names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SegmentRecord)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def mark_stopped(path: Path, ended: str, activity: Activity | None = None) -> None:
    """Sets the end of a record once; a record that is gone or has an end stays as it is."""
    try:
        record = read_record(path)
    except (OSError, ValueError):
        return
    if record.live:
        record.stopped, record.ended = time.time(), ended
        record.activity = activity or record.activity
        write_record(path, record)


def sweep_dead(run_dir: Path) -> int:
    """Ends the records of this machine whose process is gone; how many."""
    swept = 0
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            record = read_record(path)
        except (OSError, ValueError):
            continue
        if record.live and record.machine == this_machine() and start_ticks(record.pid) != record.pid_start:
            mark_stopped(path, "lost")
            swept += 1
    return swept


def read_ledger(run_dir: Path) -> tuple[list[SegmentRecord], list[str]]:
    """Records of every `segments` directory below `run_dir`, by (host, rank, start), and what was unreadable.

    A record without a start (upstream's) gets the time of its file.
    """
    records, problems = [], []
    for folder in sorted(run_dir.rglob(FOLDER)):
        if not folder.is_dir():
            continue
        for path in sorted(folder.glob("*.json")):
            try:
                record = read_record(path)
                record.file = str(path)
                record.started = record.started or path.stat().st_mtime
            except (OSError, ValueError) as error:
                problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            else:
                records.append(record)
    return sorted(records, key=lambda record: (record.host, record.rank, record.started)), problems


def superseded(records: Sequence[SegmentRecord]) -> list[tuple[SegmentRecord, SegmentRecord]]:
    """Records that say nothing of an end but whose rank has a newer one, each with that.

    Upstream's records know their rank only within their directory. Ours name a segment, so that workers of equal rank
    are told apart, and only two live records of one incarnation are one rank.
    """
    newest: dict[tuple[object, ...], SegmentRecord] = {}
    pairs = []
    for record in sorted(records, key=lambda record: record.started):
        if not record.live:
            continue
        folder = str(Path(record.file).parent)
        who = (record.incarnation, record.machine) if record.segment_name else (folder, record.role, record.model_key)
        key = (record.host, record.rank, bool(record.segment_name), *who)
        if key in newest:
            pairs.append((newest[key], record))
        newest[key] = record
    return pairs


def missing_ranks(records: Sequence[SegmentRecord]) -> list[str]:
    """Ranks below the highest one of a group (directory, role, model) that have no record."""
    groups: dict[tuple[str, str, str], set[int]] = {}
    for record in records:
        groups.setdefault((str(Path(record.file).parent), record.role, record.model_key), set()).add(record.rank)
    return [
        f"rank {rank} of {max(ranks) + 1} has no record ({role}{' ' + model if model else ''}, {folder})"
        for (folder, role, model), ranks in sorted(groups.items())
        for rank in sorted(set(range(max(ranks))) - ranks)
    ]


def largest_moment(records: Sequence[SegmentRecord]) -> list[SegmentRecord]:
    """The records that were mounted together when the pool was largest, the latest such moment.

    A rank that restarted is thus counted once.
    """
    gone = {id(old) for old, _ in superseded(records)}
    records = [record for record in records if id(record) not in gone]
    best: list[SegmentRecord] = []
    best_bytes = -1
    for moment in sorted({record.started for record in records}):
        mounted = [r for r in records if r.started <= moment and (r.stopped is None or moment < r.stopped)]
        total = sum(record.segment_size for record in mounted)
        if total >= best_bytes:
            best, best_bytes = mounted, total
    return best


def this_machine() -> str:
    """Boot id and pid namespace; "" where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
