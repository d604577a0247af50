"""The placement bench: its workers and references behave, and its figures are of the real policies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.routing.placements import bound, compare
from bench.routing.simulation import BLOCK_TOKENS, Cache, Request, Setting, read_trace

ROOT = Path(__file__).parents[2]
TRACE = Path(__file__).parent / "traces" / "conversations.jsonl"
SMALL = Setting(workers=4, blocks=200, rate=300.0)  # too little memory for every block on every worker, and queues


def request(arrival: float, *blocks: int, extra: int = 1) -> Request:
    keys = [number.to_bytes(16, "big") for number in blocks]
    return Request(arrival, len(blocks) * BLOCK_TOKENS + extra, keys)


def test_a_trace_gives_the_keys_of_full_blocks_only() -> None:
    first = read_trace(TRACE, speed=2.0, limit=3)[0]
    assert (first.arrival, first.tokens, len(first.keys)) == (18.0, 2392, 4)


class TestCache:
    def test_a_prompt_is_cached_once_it_is_done(self) -> None:
        cache, prompt = Cache(8), request(0, 1, 2)
        cached, blocks = cache.start(prompt)
        assert cached == cache.cached_tokens(prompt) == 0
        cache.finish(prompt, blocks)
        assert cache.cached_tokens(prompt) == 2 * BLOCK_TOKENS

    def test_the_last_token_is_always_computed(self) -> None:
        cache, prompt = Cache(8), request(0, 1, 2, extra=0)
        cache.finish(prompt, cache.start(prompt)[1])
        assert cache.start(prompt)[0] == prompt.tokens - 1

    def test_a_prompt_larger_than_the_cache_leaves_nothing_behind(self) -> None:
        cache, prompt = Cache(2), request(0, 1, 2, 3)
        cache.finish(prompt, cache.start(prompt)[1])
        assert cache.pool.free == 2

    def test_least_recently_used_blocks_go_first(self) -> None:
        cache = Cache(4)
        for blocks in ((1, 2), (3,), (4,)):
            prompt = request(0, *blocks, extra=0)
            cache.finish(prompt, cache.start(prompt)[1])
        assert cache.cached_tokens(request(0, 1, 2)) == 2 * BLOCK_TOKENS  # 1, 2, 3, 4 fit
        cache.finish(request(0, 5, extra=0), cache.start(request(0, 5, extra=0))[1])
        assert cache.cached_tokens(request(0, 1, 2)) == BLOCK_TOKENS


class TestReferences:
    def test_the_bound_knows_the_future(self) -> None:
        """With room for two blocks it keeps 1 and lets 2 and 3 pass."""
        trace = [request(time, block, extra=0) for time, block in enumerate((1, 2, 3, 1, 2, 3, 1))]
        assert bound(trace, 2) == pytest.approx(3 / 7)

    def test_with_room_for_all_the_bound_is_every_repetition(self) -> None:
        trace = [request(time, block, extra=0) for time, block in enumerate((1, 2, 1, 2, 1))]
        assert bound(trace, 100) == pytest.approx(3 / 5)

    def test_one_queue_for_all_workers_and_queues_by_turn(self) -> None:
        """A long prompt and then short ones for two workers: in turn, half of the short ones wait for it."""
        setting = Setting(workers=2, rate=1000.0, overhead=0.0)
        trace = [Request(0.0, length, []) for length in (3000, 1000, 1000, 1000)]
        found = compare(trace, setting, ["oracle", "all_knowing", "round_robin"])
        slowest = {kind: figures["ttft_max"] for kind, figures in found.items() if kind != "bound"}
        assert slowest == {"oracle": 3.0, "all_knowing": 3.0, "round_robin": 4.0}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return compare(read_trace(TRACE), SMALL, ["round_robin", "kv_cache_aware", "all_knowing", "oracle"])


class TestPolicies:
    def test_all_requests_are_offered_to_all(self, found: dict[str, dict[str, float]]) -> None:
        assert all(0 <= figures.get("goodput", 0) <= 1 for figures in found.values())

    def test_knowing_the_caches_finds_more_in_them(self, found: dict[str, dict[str, float]]) -> None:
        rates = {kind: figures["hit_rate"] for kind, figures in found.items()}
        assert rates["round_robin"] < rates["kv_cache_aware"] <= rates["bound"]
        assert rates["round_robin"] < rates["all_knowing"] <= rates["bound"]

    def test_nothing_beats_the_bound(self, found: dict[str, dict[str, float]]) -> None:
        assert max(figures["hit_rate"] for figures in found.values()) == found["bound"]["hit_rate"]

    def test_a_run_is_repeatable(self, found: dict[str, dict[str, float]]) -> None:
        again = compare(read_trace(TRACE), SMALL, ["kv_cache_aware", "oracle"])
        assert again["kv_cache_aware"] == found["kv_cache_aware"]


def test_the_command(tmp_path: Path) -> None:
    script = ROOT / "bench" / "routing_quality.py"
    argv = [sys.executable, str(script), str(TRACE), "--limit", "50", "--workers", "2", "--policies", "round_robin"]
    done = subprocess.run([*argv, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, check=True)
    assert "| round_robin |" in done.stdout and "| oracle |" in done.stdout
    assert (tmp_path / "out.json").exists()
