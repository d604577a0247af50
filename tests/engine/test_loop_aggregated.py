"""One loop alone: batching, chunks, reuse, ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_rig import BLOCK, EOS, MAX_SEQ_LEN, VOCAB, Worker, expected, greedy

from engine.messages import SamplingParams, SnapshotEvents
from engine.step import Chunk
from kvstore.hashing import block_keys


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length}/{seed}")
    return [chooser.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 40])
def test_answers_are_the_same_cold_and_cached(length: int) -> None:
    prompt = prompt_of(length)
    sampling = greedy(9, ignore_eos=True)
    with Worker() as worker:
        cold = worker.ask(prompt, sampling)
        warm = worker.ask(prompt, sampling)
        assert cold.choices() == warm.choices() == expected(prompt, sampling)
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (length - 1) // BLOCK * BLOCK < length
        worker.wait_baseline()


def test_many_at_once_with_a_pool_that_has_to_evict() -> None:
    """Prompts that share a prefix and part in the middle of a block: each answer is that of the prompt alone."""
    base = prompt_of(10)
    prompts = [[*base, *prompt_of(5, index)] for index in range(60)]
    sampling = SamplingParams(max_tokens=7, seed=3)
    with Worker(num_blocks=24) as worker:
        for _ in range(2):
            ids = [worker.submit(prompt, sampling) for prompt in prompts]
            for prompt, request_id in zip(prompts, ids, strict=True):
                assert worker.result(request_id).choices() == expected(prompt, sampling)
        worker.wait_baseline()
        assert worker.stats.blocks_evicted > 0 and worker.stats.prompt_tokens_local > 0
        assert max(len(step) for step in worker.runner.steps) > 1


def test_a_step_stays_within_the_token_budget_and_serves_decodes_first() -> None:
    with Worker(max_num_tokens=8, max_batch_size=4) as worker:
        later: list[str] = []

        def join_third_step(_chunks: Sequence[Chunk]) -> None:
            if len(worker.runner.steps) == 2:
                later.append(worker.submit(prompt_of(50), greedy(3, ignore_eos=True)))

        worker.runner.on_step = join_third_step
        worker.ask(prompt_of(3), greedy(30, ignore_eos=True))
        worker.result(later[0])
    for step in worker.runner.steps:
        assert sum(len(chunk.tokens) for chunk in step) <= 8
        sizes = [len(chunk.tokens) for chunk in step]
        assert sizes == sorted(sizes)
    mixed = [step for step in worker.runner.steps if len(step) == 2]
    assert any(len(step[1].tokens) == 4 for step in mixed)  # of 7 left, to a block's end


def test_seeds_make_choices_differ_and_repeat() -> None:
    prompt = prompt_of(6)
    sampling = SamplingParams(max_tokens=12, n=3, seed=2**63 - 2, ignore_eos=True)
    with Worker() as worker:
        result = worker.ask(prompt, sampling)
        assert result.choices() == expected(prompt, sampling)
        assert len({tuple(tokens) for tokens, _ in result.choices()}) == 3
        prefills = [chunk for step in worker.runner.steps for chunk in step if chunk.start == 0]
        assert len(prefills) == 1
        worker.wait_baseline()


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK - 1])
@pytest.mark.parametrize("n", [2, 4])
def test_choices_share_full_blocks_and_copy_the_tail(length: int, n: int) -> None:
    prompt = prompt_of(length)
    sampling = SamplingParams(max_tokens=6, n=n, seed=1, ignore_eos=True)
    with Worker() as worker:
        assert worker.ask(prompt, sampling).choices() == expected(prompt, sampling)
        tables = [chunk.block_table for chunk in worker.runner.steps[-1]]
        full = length // BLOCK
        assert len({tuple(table[:full]) for table in tables}) == 1
        own = [block for table in tables for block in table[full:]]
        assert len(own) == len(set(own))
        worker.wait_baseline()


def test_choices_may_end_at_different_times() -> None:
    """Among many seeds some choices end with their first token, the prompt's own among them."""
    with Worker(max_batch_size=4, num_blocks=16) as worker:
        for seed in range(60):
            prompt = prompt_of(5, seed)
            first = expected(prompt, SamplingParams(max_tokens=1, n=4, seed=seed))
            stops = [first[seed % 4][0][0]]
            sampling = SamplingParams(max_tokens=6, n=4, seed=seed, stop_token_ids=stops)
            assert worker.ask(prompt, sampling).choices() == expected(prompt, sampling)
        worker.wait_baseline()


def test_eos_and_stop_ids() -> None:
    prompt = prompt_of(5)
    tokens = expected(prompt, greedy(20, ignore_eos=True))[0][0]
    with Worker() as worker:
        stopped = worker.ask(prompt, greedy(20, ignore_eos=True, stop_token_ids=[tokens[4]]))
        assert stopped.choices() == [(tokens[:5], "stop")]
        assert stopped.outputs[-1].stop_reason == tokens[4]
        ending = next(p for p in map(lambda s: prompt_of(5, s), range(2000)) if expected(p, greedy(1))[0][0] == [EOS])
        ended = worker.ask(ending, greedy(20))
        assert ended.choices() == [([EOS], "stop")] and ended.outputs[-1].stop_reason is None
        ignored = greedy(4, ignore_eos=True)
        assert worker.ask(ending, ignored).choices() == expected(ending, ignored)
        least = greedy(9, min_tokens=5)
        answer = worker.ask(ending, least).choices()
        assert answer == expected(ending, least) and EOS not in answer[0][0][:5]
        worker.wait_baseline()


def test_max_tokens_is_cut_to_the_longest_sequence() -> None:
    prompt = prompt_of(MAX_SEQ_LEN - 2)
    with Worker(num_blocks=40) as worker:
        assert worker.ask(prompt, greedy(50, ignore_eos=True)).choices() == expected(
            prompt, greedy(50, ignore_eos=True)
        )
        assert len(worker.seen("r0").outputs) == 2


def test_logprobs_are_of_the_token() -> None:
    with Worker() as worker:
        result = worker.ask(prompt_of(5), greedy(3, ignore_eos=True, logprobs=1))
    for output in result.outputs:
        assert output.logprobs is not None and output.logprobs[0].token_id == output.token_ids[0]
        assert output.logprobs[0].top == [(output.token_ids[0], output.logprobs[0].logprob)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "words"),
    [
        ([], greedy(1), "invalid_request_error", "no tokens"),
        ([5, VOCAB], greedy(1), "invalid_request_error", f"token id {VOCAB} is outside 0..{VOCAB - 1}"),
        ([5, -1], greedy(1), "invalid_request_error", "token id -1"),
        ([5], greedy(0), "invalid_request_error", "max_tokens: 0"),
        ([5], greedy(1, n=9), "invalid_request_error", "n: 9 is outside 1..8"),
        ([5] * MAX_SEQ_LEN, greedy(1), "context_length_exceeded", f"{MAX_SEQ_LEN} tokens"),
        ([5] * 10, greedy(60), "context_length_exceeded", "need 18 KV blocks of 4 tokens, of 12 here"),
        ([5] * 10, greedy(20, n=2), "context_length_exceeded", "need 14 KV blocks"),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_numbers(
    prompt: list[int], sampling: SamplingParams, code: str, words: str
) -> None:
    with Worker(num_blocks=12) as worker:
        error = worker.ask(prompt, sampling).error
        assert error is not None and error.code == code and words in error.message and error.param
        assert not worker.runner.steps
        assert worker.ask([5] * 10, greedy(38, ignore_eos=True)).error is None  # 12 blocks exactly
        worker.wait_baseline()


def test_reuse_can_be_switched_off() -> None:
    with Worker(enable_block_reuse=False) as worker:
        for _ in range(2):
            assert worker.ask(prompt_of(20), greedy(2)).cached_tokens == 0
        worker.wait_baseline()
        assert worker.stats.blocks_reusable == 0 and not worker.events


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    prompt = prompt_of(8)
    with Worker() as worker:
        answer = worker.ask(prompt, greedy(9, ignore_eos=True)).choices()[0][0]
        follow = [*prompt, *answer, *prompt_of(3)]
        assert worker.ask(follow, greedy(2)).cached_tokens == 16  # the last token's KV was never computed
        salted = worker.ask(follow, greedy(2), cache_salt="tenant")
        assert salted.cached_tokens == 0


def test_events_and_snapshot_agree() -> None:
    prompts = [prompt_of(17, seed) for seed in range(8)]
    with Worker(num_blocks=12) as worker:
        for prompt in prompts:
            worker.ask(prompt, greedy(2))
        worker.inbox.put(SnapshotEvents(7))
        worker.wait(lambda: worker.events and worker.events[-1].snapshot_id == 7)
    mirror: set[bytes] = set()
    for batch in worker.events[:-1]:
        for event in batch.events:
            mirror = (mirror | set(event.stored)) - set(event.removed)
    [snapshot] = worker.events[-1].events
    assert snapshot.cleared and set(snapshot.stored) == mirror
    assert set(block_keys(prompts[-1], BLOCK)) <= mirror


def test_an_idle_engine_sleeps() -> None:
    with Worker() as worker:
        worker.ask(prompt_of(5), greedy(2))
        turns = 0
        turn = worker.loop.turn

        def counted() -> None:
            nonlocal turns
            turns += 1
            turn()

        worker.loop.turn = counted  # type: ignore[method-assign]
        worker.ask(prompt_of(5, 1), greedy(1))
        worker.wait_baseline()
        assert turns < 10
