"""The bench that measures routers beside each other: its arithmetic, and one short run of this project's router."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "peers"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_peers_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = load("report")


def figures(cpu: float, ttft: float, *errors: str) -> dict[str, Any]:
    return {"cpu_us": cpu, "ttft_p50_us": ttft, "ttft_p99_us": 2 * ttft, "errors": list(errors)}


ROUNDS = {
    "direct": [figures(5, 100), figures(6, 200), figures(5, 100)],
    "ours": [figures(50, 400), figures(60, 900), figures(90, 300)],
    "cheap": [figures(40, 300, "2 errors"), figures(40, 300), figures(40, 300)],
    "peer": [figures(100, 500), figures(110, 900), figures(90, 600)],
}


class TestReport:
    @pytest.fixture
    def summary(self) -> dict[str, dict[str, Any]]:
        rounds = {name: [dict(entry) for entry in found] for name, found in ROUNDS.items()}
        summary: dict[str, dict[str, Any]] = report.summarise(rounds)
        return summary

    def test_medians(self, summary: dict[str, dict[str, Any]]) -> None:
        assert (summary["ours"]["cpu_us"], summary["peer"]["cpu_us"], summary["ours"]["rounds"]) == (60, 100, 3)

    def test_added_latency_is_against_the_same_round(self, summary: dict[str, dict[str, Any]]) -> None:
        """300, 700 and 200 µs."""
        assert summary["ours"]["added_ttft_p50_us"] == 300
        assert "added_ttft_p50_us" not in summary["direct"]

    def test_a_peer_that_made_errors_is_not_the_best(self, summary: dict[str, dict[str, Any]]) -> None:
        found = report.headline(summary, ["cheap", "peer", "absent"], "ours")
        assert (found["best_peer"], found["best_peer_cpu_us"], found["kv_aware_cpu_us"]) == ("peer", 100, 60)
        assert found["cpu_ratio"] == pytest.approx(0.6)

    def test_without_peers_there_is_no_best(self, summary: dict[str, dict[str, Any]]) -> None:
        found = report.headline(summary, [], "ours")
        assert found["best_peer"] is None and found["cpu_ratio"] is None and found["kv_aware_cpu_us"] == 60

    def test_the_table_has_every_router_and_what_was_not_measured(self, summary: dict[str, dict[str, Any]]) -> None:
        growth = {"ours": {"2": {"cpu_us": 50.0, "pss_mib": 40.0}, "16": {"cpu_us": 75.0, "pss_mib": 41.0}}}
        text = report.markdown(
            {
                "routers": {"ours": "this project"},
                "summary": summary,
                "growth_workers": growth,
                "not_measured": {"other": "did not start"},
            }
        )
        assert "| this project | 60 |" in text and "| 1.50× |" in text and "other: did not start" in text


class Words:
    """One token a word."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        start = len(self.words)
        self.words += text.split()
        return list(range(start, len(self.words)))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[number] for number in ids)


def test_prompts_have_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = load("prompts")
    monkeypatch.setattr(prompts, "LENGTHS", {"100": (100, 5), "8k": (8000, 2)})
    prompts.write_bodies(tmp_path, Words())
    for name, length, count in (("100-plain", 100, 5), ("8k-plain", 8000, 2)):
        bodies = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(bodies) == count
        assert {len(body["prompt"].split()) for body in bodies} == {length}
        assert not any("@" in body["prompt"] for body in bodies)  # that is how the load generator knows a token
    streamed = json.loads((tmp_path / "100-stream64.jsonl").read_text().splitlines()[0])
    assert (streamed["stream"], streamed["max_tokens"]) == (True, 64)


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the bench's worker and load generator are C")
def test_a_short_run(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    argv = [sys.executable, str(FOLDER / "run.py"), "--routers", "ours-round_robin", "--rounds", "1"]
    argv += ["--seconds", "0.2", "--cases", "requests,chunks", "--urgent", "", "--growth", "2", "--json", str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    ours = found["summary"]["ours-round_robin"]
    assert ours["errors"] == [] and found["not_measured"] == {}
    assert 0 < found["summary"]["direct"]["cpu_us"] < ours["cpu_us"]
    assert ours["chunk_cpu_us"] > 0 and found["growth_workers"]["ours-round_robin"]["2"]["workers_used"] == 2
