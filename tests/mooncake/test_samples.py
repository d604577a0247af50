from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_pool.samples import SAMPLES_NAME, SampleLog, read_samples, take_sample
from mooncake_pool.timeline import Timeline

DETAIL = (
    b'{"total_segments":1,"segments":[{"segment_name":"h:1","te_endpoint":"h:2","size_bytes":64,"status":"OK",'
    b'"allocator_used_bytes":32,"unknown":5}]}'
)
METRICS = b"# HELP x\nmaster_key_count 3\nmaster_evicted_size_bytes 1.5e+3\nmaster_key_count_other 9\n"


class Admin(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(DETAIL if self.path == "/get_segments_detail" else METRICS)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_sample(port: int) -> None:
    sample = take_sample(port)
    assert [(s.segment_name, s.te_endpoint, s.allocator_used_bytes) for s in sample.segments] == [("h:1", "h:2", 32)]
    assert sample.metrics == {"master_key_count": 3.0, "master_evicted_size_bytes": 1500.0}


def test_the_file_covers_the_run_and_stays_small(port: int, tmp_path: Path) -> None:
    log = SampleLog(tmp_path, port, most_bytes=2000)
    taken = [sample for _ in range(60) if (sample := log.take()) is not None]
    assert len(taken) == 60 and (tmp_path / SAMPLES_NAME).stat().st_size <= 2000
    samples, problems = read_samples(tmp_path)
    assert problems == [] and samples[0] == taken[0] and samples[-1].time > taken[50].time


def test_a_master_that_does_not_answer_is_told(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, 1)
    assert log.take() is None and "refused" in str(log.trouble)


def test_lines_that_cannot_be_read(port: int, tmp_path: Path) -> None:
    SampleLog(tmp_path, port).take()
    path = tmp_path / SAMPLES_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b"nonsense\n" + whole + whole[:40])
    samples, problems = read_samples(tmp_path)
    assert len(samples) == 2 and [f"{path}:2" in problem for problem in problems] == [True]


# ---------------------------------------------------------------- quantities over time


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=5000))
def test_a_timeline_keeps_first_last_and_peak(steps: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    now = 0.0
    for step, value in steps:
        now += step
        timeline.note(now, value)
    points = timeline.points
    assert len(points) <= Timeline.MOST
    if steps:
        assert points[0][0] == steps[0][0] and points[-1][1] == steps[-1][1]
        assert max(most for _, _, most in points) == max(value for _, value in steps)
        assert [at for at, _, _ in points] == sorted({at for at, _, _ in points})


def test_a_long_timeline_is_thinned_out() -> None:
    timeline = Timeline()
    for second in range(10 * Timeline.MOST):
        timeline.note(float(second), second % 7)
    assert Timeline.MOST // 2 <= len(timeline) <= Timeline.MOST and timeline.points[0][0] == 0.0


def test_a_clock_that_is_set_back_stands_still() -> None:
    timeline = Timeline()
    timeline.note(10.0, 1)
    timeline.note(5.0, 3)
    timeline.note(5.0, 2)
    assert list(timeline) == [(10.0, 2, 3)]
