"""What the master says about itself over time: one JSON line a sample in run_dir/pool.samples.jsonl.

Kept for the report, which has the master's word beside what it rebuilds from the log. When the file has reached its
limit every second sample is dropped, so that a run of any length is covered from its start.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from mooncake_pool.manifest import write_atomically

SAMPLES_NAME = "pool.samples.jsonl"
MOST_BYTES = 2 * 1024 * 1024
_SECONDS = 1.0
_WANTED = re.compile(
    r"^(master_(?:allocated_bytes|total_capacity_bytes|key_count|active_clients|evicted_key_count|evicted_size_bytes"
    r"|attempted_evictions_total|successful_evictions_total|put_start_alloc_failures_total)) ([0-9.e+-]+)$",
    re.MULTILINE,
)


class SegmentSample(msgspec.Struct):
    segment_name: str
    te_endpoint: str = ""
    size_bytes: int = 0
    allocator_used_bytes: int = 0
    status: str = ""


class Sample(msgspec.Struct):
    time: float  # Unix
    segments: list[SegmentSample] = []
    metrics: dict[str, float] = {}


def take_sample(metrics_port: int) -> Sample:
    """OSError or ValueError when the master does not answer in time or sense."""
    detail = json.loads(_fetch(metrics_port, "get_segments_detail"))
    segments = msgspec.convert(detail.get("segments", []), list[SegmentSample])
    metrics = {name: float(value) for name, value in _WANTED.findall(_fetch(metrics_port, "metrics"))}
    return Sample(time.time(), segments, metrics)


def _fetch(port: int, route: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{route}", timeout=_SECONDS) as answer:
        content: bytes = answer.read()
    return content.decode(errors="replace")


class SampleLog:
    """Appends to the file of one run. Trouble is told once and costs nothing else."""

    def __init__(self, run_dir: Path, metrics_port: int, most_bytes: int = MOST_BYTES) -> None:
        self.trouble: str | None = None
        self._path = run_dir / SAMPLES_NAME
        self._port = metrics_port
        self._most_bytes = most_bytes

    def take(self) -> Sample | None:
        try:
            sample = take_sample(self._port)
            with open(self._path, "ab") as file:
                file.write(msgspec.json.encode(sample) + b"\n")
                size = file.tell()
            if size > self._most_bytes:
                self._thin_out()
        except (OSError, ValueError) as error:
            self.trouble = str(error)
            return None
        return sample

    def _thin_out(self) -> None:
        lines = self._path.read_text().splitlines(keepends=True)
        write_atomically(self._path, "".join(lines[::2]))


def read_samples(run_dir: Path) -> tuple[list[Sample], list[str]]:
    """Samples in order, and what could not be read. The last line of a run that was cut short may be half there."""
    path = run_dir / SAMPLES_NAME
    samples, problems = [], []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path}: {error.strerror or error}"]
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Sample)
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            samples.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number < len(lines):
                problems.append(f"{path}:{number}: {error}")
    return samples, problems
