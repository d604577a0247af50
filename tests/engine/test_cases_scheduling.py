"""Acceptance cases C008, C009, C078, C084, C088 and C110, on engine loops without processes."""

from __future__ import annotations

import threading
import time

import pytest
from engine_rig import BLOCK, MAX_SEQ_LEN, Worker, expected, greedy

from engine.messages import SamplingParams
from kvstore.handoff import Handle


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * index + 31 * seed) % 90 for index in range(length)]


@pytest.mark.parametrize("budget", [5, 32])
def test_c008_a_prompt_that_is_too_long_is_refused_and_the_next_one_served(budget: int) -> None:
    with Worker(max_num_tokens=budget) as worker:
        error = worker.ask(prompt_of(MAX_SEQ_LEN + 36), greedy(8)).error
        assert error is not None and error.code == "context_length_exceeded"
        assert str(MAX_SEQ_LEN + 36) in error.message and str(MAX_SEQ_LEN) in error.message
        assert worker.ask(prompt_of(5), greedy(8)).choices() == expected(prompt_of(5), greedy(8))
        worker.wait_baseline()


def test_c008_a_prompt_longer_than_a_step_is_cut() -> None:
    with Worker(max_num_tokens=7) as worker:
        assert worker.ask(prompt_of(90), greedy(8)).choices() == expected(prompt_of(90), greedy(8))


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_c009_the_edge_of_the_context(policy: str) -> None:
    with Worker(num_blocks=MAX_SEQ_LEN // BLOCK, capacity_policy=policy) as worker:
        last = worker.ask(prompt_of(MAX_SEQ_LEN - 1), greedy(1, ignore_eos=True))
        assert [(len(tokens), reason) for tokens, reason in last.choices()] == [(1, "length")]
        assert worker.ask(prompt_of(MAX_SEQ_LEN), greedy(1)).error is not None
        cut = worker.ask(prompt_of(MAX_SEQ_LEN - 4), greedy(100, ignore_eos=True))
        assert [(len(tokens), reason) for tokens, reason in cut.choices()] == [(4, "length")]
        worker.wait_baseline()


def test_c078_chunks_end_at_blocks_and_a_short_prompt_is_not_blocked() -> None:
    with Worker(num_blocks=64, max_num_tokens=16, max_batch_size=4) as worker:
        short: list[str] = []

        def join(_chunks: object) -> None:
            if len(worker.runner.steps) == 1:
                short.append(worker.submit(prompt_of(4, 1), greedy(2, ignore_eos=True)))

        worker.runner.on_step = join
        long = worker.submit(prompt_of(120), greedy(3, ignore_eos=True))
        assert worker.result(long).choices() == expected(prompt_of(120), greedy(3, ignore_eos=True))
        assert worker.result(short[0]).choices() == expected(prompt_of(4, 1), greedy(2, ignore_eos=True))
        steps = worker.runner.steps
    ends = [chunk.start + len(chunk.tokens) for step in steps for chunk in step if len(chunk.tokens) > 1]
    assert all(end % BLOCK == 0 for end in ends)
    first = next(i for i, step in enumerate(steps) if any(chunk.tokens == prompt_of(4, 1) for chunk in step))
    assert first <= 2, "it came into the second step at the earliest"


def test_c084_a_batch_of_one_makes_progress_in_order_and_sleeps_when_idle() -> None:
    with Worker("ctx", max_batch_size=4) as context, Worker("gen", max_batch_size=1) as generation:
        prompts = [prompt_of(6 + index, index) for index in range(8)]
        sampling = greedy(8, ignore_eos=True)
        first = [context.submit(prompt, sampling, handoff_id=2**41 + i) for i, prompt in enumerate(prompts)]
        handles: list[Handle] = [context.result(request_id).handle for request_id in first]
        order: list[int] = []
        asked = [generation.submit(p, sampling, handle=h) for p, h in zip(prompts, handles, strict=True)]
        for index, request_id in enumerate(asked):
            assert generation.result(request_id).choices() == expected(prompts[index], sampling)
            order.append(index)
            assert all(not generation.seen(later).outputs for later in asked[index + 2 :]), "first come, first served"
        for i in range(8):
            context.release(2**41 + i)
        generation.wait_baseline()
        context.wait_baseline()
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.025, "less than 5 % of a core"


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_c088_blocks_that_are_read_are_not_given_away(policy: str) -> None:
    """A is aborted while its blocks are fetched; B, which needs all free blocks, is right, and so is a second abort."""
    with Worker("ctx") as context, Worker("gen", num_blocks=8, capacity_policy=policy) as generation:
        prompt, sampling = prompt_of(14), greedy(4, ignore_eos=True)
        handle = context.result(context.submit(prompt, sampling, handoff_id=2**41)).handle
        generation.delay(fetch=0.3)
        a = generation.submit(prompt, sampling, handle=handle)
        generation.wait(lambda: generation.stats.requests_fetching == 1)
        generation.abort(a)
        b = generation.submit(prompt_of(25, 3), sampling)
        assert generation.result(b).choices() == expected(prompt_of(25, 3), sampling)
        generation.abort(a)
        generation.abort("nobody")
        generation.wait_baseline()


def test_c110_without_reuse_nothing_is_cached_and_nothing_is_told() -> None:
    with Worker(enable_block_reuse=False, host_cache_size=1 << 20, event_buffer_max_size=8) as worker:
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        for _ in range(3):
            assert worker.ask(prompt_of(20), sampling).cached_tokens == 0
        worker.wait_baseline()
        assert worker.events == [] and worker.feeds == [] and worker.stats.host_blocks_used == 0
        assert worker.stats.blocks_free == worker.stats.blocks_total
