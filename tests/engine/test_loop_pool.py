"""The block store is a cache: whatever it does, answers are those of a worker without one (C134)."""

from __future__ import annotations

import time

import pytest
from engine_rig import BLOCK, MemoryStore, Worker, expected, greedy

from engine.config import PoolConfig
from kvstore.hashing import block_keys

PROMPT = [3 + (index * index) % 90 for index in range(42)]
KEYS = block_keys(PROMPT, BLOCK)
SAMPLING = greedy(6, ignore_eos=True)
ANSWER = expected(PROMPT, SAMPLING)


def filled() -> MemoryStore:
    """A store that another worker has filled with PROMPT's blocks."""
    store = MemoryStore()
    with Worker("first", store=store) as worker:
        worker.ask(PROMPT, SAMPLING)
        worker.wait_baseline()
    assert len(store.values) == len(PROMPT) // BLOCK + 1  # one block was filled by the answer
    return store


def test_what_one_worker_computed_another_loads() -> None:
    store = filled()
    with Worker("second", store=store) as worker:
        result = worker.ask(PROMPT, SAMPLING)
        assert result.choices() == ANSWER and result.cached_tokens == 40
        timing = result.outputs[0].timing
        assert timing is not None and (timing.fetch_path, timing.fetched_blocks) == ("pool", 10)
        assert worker.stats.prompt_tokens_computed == 2 and worker.stats.prompt_tokens_pool == 40
        again = worker.ask(PROMPT, SAMPLING)
        assert again.choices() == ANSWER and again.cached_tokens == 40
        worker.wait_baseline()
        assert worker.stats.prompt_tokens_pool == 40 and worker.stats.prompt_tokens_local == 40


def test_a_whole_prompt_in_the_store_leaves_the_last_token_to_compute() -> None:
    store = filled()
    prompt = PROMPT[: 2 * BLOCK]
    with Worker("second", store=store) as worker:
        result = worker.ask(prompt, SAMPLING)
        assert result.choices() == expected(prompt, SAMPLING) and result.cached_tokens == BLOCK


def test_the_store_goes_on_where_the_own_cache_ends() -> None:
    store = filled()
    with Worker("second", store=store) as worker:
        store.up = False
        worker.ask(PROMPT[:17], greedy(1))
        store.up = True
        result = worker.ask(PROMPT, SAMPLING)
        assert result.choices() == ANSWER and result.cached_tokens == 40
        worker.wait_baseline()
        assert worker.stats.prompt_tokens_pool == 24


@pytest.mark.parametrize("index", [0, 5, 9])
@pytest.mark.parametrize("fault", ["missing", "known but lost", "corrupt", "slow", "too slow", "down", "down later"])
def test_every_fault_falls_back_to_computing(fault: str, index: int) -> None:
    store = filled()
    match fault:
        case "missing":
            del store.values[KEYS[index]]
        case "known but lost":
            store.lost.add(KEYS[index])
        case "corrupt":
            store.corrupt.add(KEYS[index])
        case "slow":
            store.slow = 0.05
        case "too slow":
            store.slow = 5.0
        case "down":
            store.up = False
    store.refuses_puts = True
    with Worker("second", store=store) as worker:
        if fault == "down later":
            worker.delay(fetch=0.05)
            request_id = worker.submit(PROMPT, SAMPLING)
            worker.wait(lambda: worker.stats.requests_fetching == 1)
            store.up = False
        else:
            request_id = worker.submit(PROMPT, SAMPLING)
        start = time.monotonic()
        result = worker.result(request_id)
        assert time.monotonic() - start < 2.0
        assert result.choices() == ANSWER
        usable = index * BLOCK if fault in ("missing", "known but lost", "corrupt") else 40 if fault == "slow" else 0
        assert result.cached_tokens == usable
        worker.wait_baseline()
        assert worker.stats.prompt_tokens_computed == len(PROMPT) - usable
        failures = {
            "known but lost": {"pool_short": 1},
            "corrupt": {"pool_short": 1},
            "too slow": {"pool_short": 1},
            "down later": {"pool_down": 1},
        }.get(fault, {})
        assert worker.stats.fetch_failures == failures
        assert worker.stats.pool_state == store.state()


def test_others_run_while_one_fetches() -> None:
    store = filled()
    with Worker("second", store=store) as worker:
        worker.delay(fetch=30)
        slow = worker.submit(PROMPT, SAMPLING)
        worker.wait(lambda: worker.stats.requests_fetching == 1)
        short = [5, 6, 7]
        assert worker.ask(short, SAMPLING).choices() == expected(short, SAMPLING)
        assert not worker.seen(slow).outputs
        worker.delay()
        assert worker.result(slow).choices() == ANSWER


def test_put_failures_only_count() -> None:
    store = MemoryStore()
    store.refuses_puts = True
    with Worker(store=store) as worker:
        assert worker.ask(PROMPT, SAMPLING).choices() == ANSWER
        worker.wait_baseline()
        assert worker.stats.pool_put_failures == 11 and worker.stats.pool_put_blocks == 0


def test_blocks_stay_pinned_until_they_are_stored() -> None:
    store = MemoryStore()
    with Worker(store=store) as worker:
        worker.delay(publish=30)
        worker.ask(PROMPT, SAMPLING)
        worker.wait_baseline(pinned=11)
        assert not store.values
        worker.delay()
        worker.wait_baseline()
        assert worker.stats.pool_put_blocks == 11 == len(store.values)


def test_a_store_that_takes_nothing_pins_a_bounded_part_of_the_pool() -> None:
    store = MemoryStore()
    with Worker(store=store, num_blocks=32) as worker:
        worker.delay(publish=30)
        for seed in range(6):
            prompt = [3 + seed, *PROMPT]
            assert worker.ask(prompt, SAMPLING).choices() == expected(prompt, SAMPLING)
        worker.wait_baseline(pinned=16)
        assert worker.stats.pool_put_failures == 6 * 12 - 16


@pytest.mark.parametrize(("role", "puts", "gets"), [("producer", 11, 0), ("consumer", 0, 40), ("capacity", 0, 0)])
def test_roles(role: str, puts: int, gets: int) -> None:
    store = filled()
    pool = PoolConfig(pool="none:1", role=role, get_timeout=0.3)
    with Worker("second", store=store, pool=pool) as worker:
        assert worker.ask(PROMPT, SAMPLING).choices() == ANSWER
        worker.wait_baseline()
        assert worker.stats.pool_put_blocks == puts and worker.stats.prompt_tokens_pool == gets
        handed = worker.ask(PROMPT, SAMPLING, handoff_id=9)
        assert handed.handle.pool == (role == "producer")
