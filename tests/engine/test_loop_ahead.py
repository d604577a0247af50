"""generation_first on two engine loops: any order, chunks fetched while others are computed, every way it can end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from ahead_rig import IDS, AheadPair, AheadWorker
from engine_rig import BLOCK, EOS, expected, greedy

from engine.messages import Arrival, HandoffProgress, HandoffWanted, SamplingParams


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randint(3, 96) for _ in range(length)]


@pytest.fixture
def pair() -> Iterator[AheadPair]:
    with AheadWorker("ctx", handoff_timeout=5.0) as context, AheadWorker("gen", handoff_timeout=5.0) as generation:
        yield AheadPair(context, generation)


@pytest.mark.parametrize("context_first", [False, True], ids=["generation first", "context first"])
@pytest.mark.parametrize("length", [1, 3, BLOCK, BLOCK + 1, 16, 17, 40, 61])
@pytest.mark.parametrize("sampling", [greedy(5, ignore_eos=True), SamplingParams(max_tokens=5, seed=9, n=2)])
def test_same_as_one_worker(pair: AheadPair, length: int, context_first: bool, sampling: SamplingParams) -> None:
    result = pair.ask(prompt_of(length), sampling, context_first)
    assert result.choices() == expected(prompt_of(length), sampling)
    pair.wait_baseline()
    blocks = -(-length // BLOCK)
    if pair.context.stats.handoffs_offered:
        assert pair.generation.stats.fetch_blocks == blocks
        assert pair.context.stats.handoffs_done == 1 and not pair.generation.stats.fetch_failures


def test_blocks_arrive_while_the_prompt_is_computed(pair: AheadPair) -> None:
    arrived: list[int] = []
    pair.context.runner.on_step = lambda chunks: arrived.append(pair.generation.stats.fetch_blocks)
    pair.context.delay(prefill_chunk=0.1)
    sampling = greedy(4, ignore_eos=True)
    assert pair.ask(prompt_of(60), sampling).choices() == expected(prompt_of(60), sampling)
    assert arrived == [0, 4, 8, 12], "each chunk of 16 tokens was there before the next one was computed"
    pair.wait_baseline()


def test_reuse_on_both_sides(pair: AheadPair) -> None:
    sampling = greedy(4, ignore_eos=True)
    for _ in range(2):
        assert pair.ask(prompt_of(30), sampling).choices() == expected(prompt_of(30), sampling)
    pair.wait_baseline()
    assert pair.generation.stats.fetch_blocks == 8 + 1, "only the partial block is fetched again"


def test_the_first_token_ends_the_answer(pair: AheadPair) -> None:
    prompt = next(p for p in map(lambda s: prompt_of(9, s), range(5000)) if expected(p, greedy(4))[0][0] == [EOS])
    assert pair.ask(prompt, greedy(4)).choices() == [([EOS], "stop")]
    pair.wait_baseline()
    assert pair.generation.stats.fetch_blocks <= 2 and pair.context.stats.handoffs_offered == 0


def test_a_prompt_waits_for_its_reader(pair: AheadPair) -> None:
    """C096: prefill does not run ahead of the room that generation workers have made."""
    first = pair.submit_context(next(IDS), prompt_of(20), greedy(4))
    other = pair.context.ask(prompt_of(8), greedy(2, ignore_eos=True))
    assert len(other.outputs) == 2 and not pair.context.seen(first).outputs
    assert pair.context.stats.blocks_used == pair.context.stats.blocks_pinned == 0
    pair.context.abort(first)
    pair.wait_baseline()


def test_capacity_inversion() -> None:
    """C095: pools of 8 blocks, requests of 5, opposite orders on the two sides; no time-out is near."""
    options = {"num_blocks": 8, "handoff_timeout": 600.0, "fetch_timeout": 600.0}
    with AheadWorker("ctx", **options) as context, AheadWorker("gen", **options) as generation:
        pair = AheadPair(context, generation)
        sampling = greedy(3, ignore_eos=True)
        jobs = [(next(IDS), prompt_of(18, seed)) for seed in range(20)]
        for handoff_id, prompt in reversed(jobs):
            pair.submit_context(handoff_id, prompt, sampling)
        ids = [pair.submit_generation(handoff_id, prompt, sampling) for handoff_id, prompt in jobs]
        for request_id, (_, prompt) in zip(ids, jobs, strict=True):
            assert generation.result(request_id).choices() == expected(prompt, sampling)
        pair.wait_baseline()


@pytest.mark.parametrize("when", ["never came", "before any block", "between blocks", "last message"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lost_context_worker(when: str, policy: str) -> None:
    options = {"handoff_timeout": 0.3, "on_handoff_failure": policy}
    with AheadWorker("ctx", **options) as context, AheadWorker("gen", **options) as generation:
        pair = AheadPair(context, generation)
        prompt, sampling, handoff_id = prompt_of(60), greedy(4, ignore_eos=True), next(IDS)
        progress = [0]

        def lose(message: object) -> bool:
            if not isinstance(message, HandoffProgress):
                return False
            progress[0] += 1
            late = {"never came": 0, "before any block": 0, "between blocks": 2, "last message": 3}[when]
            if progress[0] <= late or message.error is not None:
                return False
            generation.inbox.put(Arrival(pair.requests[handoff_id], error="the context worker is gone"))
            return True

        pair.lose = lose
        request_id = pair.submit_generation(handoff_id, prompt, sampling)
        if when != "never came":
            pair.submit_context(handoff_id, prompt, sampling)
        result = generation.result(request_id)
        if policy == "recompute":
            assert result.choices() == expected(prompt, sampling)
        else:
            assert result.error is not None and result.error.code == "handoff_refused"
        pair.wait_baseline()
        assert generation.stats.fetch_failures["arrival"] == 1


@pytest.mark.parametrize("stage", ["held", "prefill", "fetch", "decode"])
@pytest.mark.parametrize("side", ["context", "generation"])
def test_aborts(pair: AheadPair, stage: str, side: str) -> None:
    handoff_id, prompt, sampling = next(IDS), prompt_of(60), greedy(60, ignore_eos=True)
    if stage == "prefill":
        pair.context.delay(prefill_chunk=0.2)
    elif stage == "fetch":
        pair.generation.delay(fetch=0.5)
    elif stage == "decode":
        pair.generation.delay(step=0.05)
    generation = pair.submit_generation(handoff_id, prompt, sampling)
    pair.generation.wait(lambda: pair.generation.stats.requests_fetching == 1)
    context = pair.submit_context(handoff_id, prompt, sampling) if stage != "held" else None
    if stage in ("prefill", "fetch"):
        pair.context.wait(lambda: any(isinstance(message, HandoffProgress) for message in pair.seen))
    elif stage == "decode":
        pair.generation.wait(lambda: pair.generation.seen(generation).outputs)
    if side == "generation":
        pair.generation.abort(generation)
    elif context is not None:
        pair.context.abort(context)
        assert pair.generation.result(generation).choices() == expected(prompt, sampling)
    else:
        pair.generation.abort(generation)
    if side == "generation" and context is not None and stage == "prefill":
        error = pair.context.result(context).error
        assert error is not None and "released" in error.message
    pair.wait_baseline()


def test_messages_twice(pair: AheadPair) -> None:
    pair.double = lambda message: True
    sampling = greedy(5, ignore_eos=True)
    for seed in range(5):
        assert pair.ask(prompt_of(40, seed), sampling).choices() == expected(prompt_of(40, seed), sampling)
    pair.wait_baseline()
    assert not pair.generation.stats.fetch_failures


def test_a_request_that_never_comes_and_a_reader_that_never_comes() -> None:
    with AheadWorker("ctx", handoff_timeout=0.2) as context, AheadWorker("gen") as generation:
        pair = AheadPair(context, generation)
        held = pair.submit_context(next(IDS), prompt_of(9), greedy(3))
        error = context.result(held).error
        assert error is not None and error.code == "handoff_refused" and "no generation worker" in error.message
        waiting = pair.submit_generation(next(IDS), prompt_of(9), greedy(3, ignore_eos=True))
        assert generation.result(waiting).choices() == expected(prompt_of(9), greedy(3, ignore_eos=True))
        pair.wait_baseline()
        wanted = [message.wanted for message in pair.seen if isinstance(message, HandoffWanted)]
        assert wanted == [True, False]


def test_another_model_is_refused_with_both_values(pair: AheadPair) -> None:
    handoff_id = next(IDS)
    generation = pair.submit_generation(handoff_id, prompt_of(20), greedy(3))
    object.__setattr__(pair.context.loop.offers, "_fingerprint", "e" * 32)
    pair.submit_context(handoff_id, prompt_of(20), greedy(3))
    error = pair.generation.result(generation).error
    assert error is not None and "e" * 32 in error.message and "f" * 32 in error.message
    pair.wait_baseline()
