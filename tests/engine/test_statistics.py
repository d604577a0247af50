"""What is told about steps, requests and the cache: seed's fields, drained once, nothing when off."""

from __future__ import annotations

import json
from typing import Any

from engine_rig import BLOCK, Worker, greedy

from engine.blocks import BlockPool
from engine.cache_events import CacheEventLog
from engine.feeds import Feeds
from engine.host_tier import HostTier
from engine.messages import Feed
from kvstore.hashing import block_keys, chain_seed, v1_block_key


def prompt_of(length: int) -> list[int]:
    return [3 + 7 * index % 90 for index in range(length)]


def told(worker: Worker, feed: str) -> list[dict[str, Any]]:
    return [json.loads(item) for each in worker.feeds if each.name == feed for item in each.items]


# ---------------------------------------------------------------- steps


def test_steps_have_the_fields_of_the_format() -> None:
    with Worker(enable_iter_perf_stats=True) as worker:
        worker.ask(prompt_of(10), greedy(3, ignore_eos=True))
        worker.ask(prompt_of(10), greedy(3, ignore_eos=True))
        worker.wait(lambda: worker.stats.steps == 6 and len(told(worker, "iterations")) == 6)
        records = told(worker, "iterations")
    assert [record["iter"] for record in records] == [1, 2, 3, 4, 5, 6]
    last = records[-1]
    assert last["iterLatencyMS"] > 0 and last["cpuMemUsage"] > 0 and last["gpuMemUsage"] == 0
    assert [record["numActiveRequests"] for record in records] == [1, 1, 0, 1, 1, 0]
    assert [record["numNewActiveRequests"] for record in records] == [1, 0, 0, 1, 0, 0]
    assert [record["numCompletedRequests"] for record in records] == [0, 0, 1, 0, 0, 1]
    batches = [record["inflightBatchingStats"] for record in records]
    assert [batch["numContextRequests"] for batch in batches] == [1, 0, 0, 1, 0, 0]
    assert [batch["numGenRequests"] for batch in batches] == [0, 1, 1, 0, 1, 1]
    assert batches[0]["numCtxTokens"] == 10 and batches[3]["numCtxTokens"] == 1, "the rest was in the cache"
    cache = last["kvCacheStats"]
    assert cache["tokensPerBlock"] == BLOCK and cache["maxNumBlocks"] == 32
    assert cache["reusedBlocks"] == 2 and cache["missedBlocks"] == 3 + 1
    assert cache["cacheHitRate"] == 2 / 6
    assert cache["freeNumBlocks"] + cache["usedNumBlocks"] == 32


def test_only_every_nth_step() -> None:
    with Worker(enable_iter_perf_stats=True, iter_perf_stats_interval=3) as worker:
        worker.ask(prompt_of(4), greedy(7, ignore_eos=True))
        worker.wait(lambda: len(told(worker, "iterations")) == 2)
        assert [record["iter"] for record in told(worker, "iterations")] == [3, 6]


def test_off_means_nothing_is_collected() -> None:
    with Worker() as worker:
        worker.ask(prompt_of(10), greedy(3))
        worker.wait_baseline()
        assert worker.feeds == []


# ---------------------------------------------------------------- requests


def test_a_request_has_its_times_and_blocks() -> None:
    with Worker(return_perf_metrics=True) as worker:
        worker.ask(prompt_of(10), greedy(3, ignore_eos=True))
        worker.ask(prompt_of(10), greedy(3, ignore_eos=True))
        worker.wait(lambda: len(told(worker, "requests")) == 2)
        first, second = (record["perf_metrics"] for record in told(worker, "requests"))
    assert (first["first_iter"], first["last_iter"]) == (0, 2)
    times = first["timing_metrics"]
    assert times["arrival_time"] <= times["first_scheduled_time"] <= times["first_token_time"]
    assert times["first_token_time"] <= times["last_token_time"]
    assert first["kv_cache_metrics"]["num_reused_blocks"] == 0 and first["kv_cache_metrics"]["num_missed_blocks"] == 3
    assert second["kv_cache_metrics"]["num_reused_blocks"] == 2 and second["kv_cache_metrics"]["num_missed_blocks"] == 1


def test_a_refused_request_has_no_record() -> None:
    with Worker(return_perf_metrics=True) as worker:
        assert worker.ask([], greedy(3)).error is not None
        worker.wait_baseline()
        assert told(worker, "requests") == []


# ---------------------------------------------------------------- cache events


def events(log: CacheEventLog) -> list[dict[str, Any]]:
    taken = [json.loads(item) for item in log.take()]
    ids = [event["event_id"] for event in taken]
    assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
    return [event["data"] for event in taken]


def pool_with_log(num_blocks: int = 2, host: int = 0, limit: int = 100) -> tuple[BlockPool, CacheEventLog]:
    tier = HostTier(host, lambda block, place: None, lambda place, block: None) if host else None
    pool = BlockPool(num_blocks, host=tier)
    log = CacheEventLog(limit, 128, (num_blocks, host))
    pool.report_to(log)
    return pool, log


def store(pool: BlockPool, tokens: list[int], salt: str = "") -> None:
    pool.reserve(len(tokens) // BLOCK)
    blocks = pool.allocate(len(tokens) // BLOCK)
    parent = chain_seed(salt)
    for index, (block, key) in enumerate(zip(blocks, block_keys(tokens, BLOCK, salt), strict=True)):
        pool.register(block, key, parent, tokens[index * BLOCK : (index + 1) * BLOCK])
        parent = key
    pool.release(blocks)


def test_a_chain_is_one_event_with_the_hashes_of_the_format() -> None:
    pool, log = pool_with_log()
    store(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    created, stored = events(log)
    assert created == {"type": "created", "num_blocks_per_cache_level": [2, 0]}
    first, second = stored["blocks"]
    assert stored["parent_hash"] is None
    assert first["block_hash"] == 924206229973855 == v1_block_key([1, 2, 3, 4])
    assert second["block_hash"] == 2728178455351807326
    assert first["tokens"][0] == {"type": "unique_token", "token_id": 1, "token_extra_id": 0}
    assert (first["cache_level"], first["priority"]) == (0, 35)


def test_a_later_block_names_its_parent_and_a_salt_changes_the_hash() -> None:
    pool, log = pool_with_log(4)
    store(pool, [1, 2, 3, 4])
    events(log)
    [block] = pool.match(block_keys([1, 2, 3, 4], BLOCK))
    assert block is not None
    pool.acquire([block])
    pool.reserve(1)
    [next_block] = pool.allocate(1)
    keys = block_keys([1, 2, 3, 4, 5, 6, 7, 8], BLOCK)
    pool.register(next_block, keys[1], keys[0], [5, 6, 7, 8])
    store(pool, [1, 2, 3, 4], salt="tenant")
    follower, salted = events(log)
    assert follower["parent_hash"] == 924206229973855
    assert follower["blocks"][0]["block_hash"] == 2728178455351807326
    assert salted["parent_hash"] is None and salted["blocks"][0]["block_hash"] != 924206229973855


def test_removed_and_updated_name_what_was_stored() -> None:
    pool, log = pool_with_log(1, host=1)
    store(pool, [1, 2, 3, 4])
    store(pool, [5, 6, 7, 8])
    store(pool, [9, 9, 9, 9])
    _, one, moved, two, gone, moved_too, three = events(log)
    assert moved == {
        "type": "updated",
        "block_hash": one["blocks"][0]["block_hash"],
        "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
    }
    assert gone == {"type": "removed", "block_hashes": [924206229973855]}
    assert moved_too["block_hash"] == two["blocks"][0]["block_hash"] and three["type"] == "stored"


def test_a_changed_priority_is_an_update() -> None:
    pool, log = pool_with_log()
    store(pool, [1, 2, 3, 4])
    [block] = pool.match(block_keys([1, 2, 3, 4], BLOCK))
    assert block is not None
    pool.set_priority(block, 80)
    assert events(log)[-1]["priority"] == {"type": "event_diff", "old_value": 35, "new_value": 80}


def test_the_buffer_keeps_the_newest_and_the_gap_shows() -> None:
    pool, log = pool_with_log(64, limit=3)
    for first in range(10):
        store(pool, [first, 0, 0, 0])
    assert [json.loads(item)["event_id"] for item in log.take()] == [8, 9, 10]
    assert log.take() == []


def test_events_come_out_of_a_worker_and_not_without_reuse() -> None:
    with Worker(event_buffer_max_size=64) as worker:
        worker.ask(prompt_of(10), greedy(1))
        worker.wait(lambda: len(told(worker, "cache_events")) == 2)
        created, stored = (event["data"] for event in told(worker, "cache_events"))
        assert created["type"] == "created" and len(stored["blocks"]) == 2
        assert told(worker, "cache_events")[0]["window_size"] == 128
    with Worker(event_buffer_max_size=64, enable_block_reuse=False) as worker:
        worker.ask(prompt_of(10), greedy(1))
        worker.wait_baseline()
        assert worker.feeds == [] and worker.events == []


def test_unread_records_are_bounded() -> None:
    feeds = Feeds(limit=3)
    feeds.take(Feed("iterations", [b"1", b"2"]))
    feeds.take(Feed("iterations", [b"3", b"4"]))
    assert feeds.drain("iterations") == [b"2", b"3", b"4"] and feeds.drain("iterations") == []
