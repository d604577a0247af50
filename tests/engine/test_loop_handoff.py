"""Two loops and a hand-off between them: the answer is the one that one loop alone gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from engine_rig import BLOCK, EOS, VOCAB, MemoryStore, Result, Worker, expected, greedy

from engine.messages import SamplingParams
from kvstore.handoff import Handle
from kvstore.hashing import block_keys

IDS = itertools.count(1 << 41)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + index * index * 7 + length) % (VOCAB - 3) for index in range(length)]


class Pair:
    """A context and a generation worker, and what the HTTP processes do between them."""

    def __init__(self, context: Worker, generation: Worker) -> None:
        self.context = context
        self.generation = generation

    def prefill(self, prompt: list[int], sampling: SamplingParams, **more: str) -> Result:
        return self.context.ask(prompt, sampling, handoff_id=next(IDS), **more)

    def decode(self, prompt: list[int], sampling: SamplingParams, handle: Handle) -> Result:
        seen = len(self.generation.fetched)
        result = self.generation.ask(prompt, sampling, handle=handle)
        self.generation.wait(lambda: len(self.generation.fetched) > seen)
        fetched = self.generation.fetched[-1]
        assert (fetched.handoff_id, fetched.incarnation) == (handle.handoff_id, handle.incarnation)
        assert fetched.endpoint == handle.endpoint == "ctx:1"
        self.context.release(fetched.handoff_id, fetched.incarnation)
        return result

    def ask(self, prompt: list[int], sampling: SamplingParams, **more: str) -> Result:
        first = self.prefill(prompt, sampling, **more)
        assert all(output.finish_reason for output in first.outputs)
        if first.outputs[-1].handle is None:
            return first
        return self.decode(prompt, sampling, first.handle)

    def wait_baseline(self) -> None:
        self.context.wait_baseline()
        self.generation.wait_baseline()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Worker("ctx", role="context") as context, Worker("gen", role="generation") as generation:
        yield Pair(context, generation)


SAMPLINGS = [
    greedy(9, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=5, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=9, seed=5, n=3, ignore_eos=True),
]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 43])
@pytest.mark.parametrize("warm", ["none", "context", "generation", "both"])
def test_equal_to_one_worker_at_every_length(pair: Pair, length: int, warm: str) -> None:
    prompt = prompt_of(length)
    if warm in ("context", "both"):
        pair.context.ask(prompt, greedy(1))
    if warm in ("generation", "both"):
        pair.generation.ask(prompt, greedy(1))
    here = length // BLOCK if warm in ("generation", "both") else 0
    pair.generation.wait(lambda: pair.generation.stats.requests_running == 0)
    computed = pair.generation.stats.prompt_tokens_computed
    for turn, sampling in enumerate(SAMPLINGS):
        result = pair.ask(prompt, sampling)
        assert result.choices() == expected(prompt, sampling)
        if turn == 0:
            timing = result.outputs[0].timing
            assert timing is not None and timing.fetched_blocks == -(-length // BLOCK) - here
    pair.wait_baseline()
    assert pair.generation.stats.prompt_tokens_computed == computed and not pair.generation.stats.fetch_failures
    assert pair.context.stats.handoffs_done == pair.context.stats.handoffs_offered == len(SAMPLINGS)


def test_logprobs_and_usage_come_along(pair: Pair) -> None:
    prompt = prompt_of(12)
    sampling = greedy(5, ignore_eos=True, logprobs=1)
    alone = pair.generation.ask(prompt, sampling, cache_salt="apart")
    pair.context.ask(prompt, greedy(1))
    handed = pair.ask(prompt, sampling)
    assert [output.logprobs for output in handed.outputs] == [output.logprobs for output in alone.outputs]
    assert handed.cached_tokens == 8 and alone.cached_tokens == 0


def test_pages_stay_pinned_until_the_acknowledgement(pair: Pair) -> None:
    prompt = prompt_of(10)
    first = pair.prefill(prompt, greedy(4, ignore_eos=True))
    [start] = first.outputs[0].starts or []
    assert first.choices() == [(expected(prompt, greedy(1, ignore_eos=True))[0][0], "not_finished")]
    assert start.token == first.outputs[0].token_ids[0] and first.handle.starts == [start]
    pair.context.wait_baseline(pinned=3)
    assert pair.context.stats.handoffs_open == 1
    pair.context.release(first.handle.handoff_id, "another incarnation")
    pair.context.release(12345)
    pair.decode(prompt, greedy(4, ignore_eos=True), first.handle)
    pair.wait_baseline()
    assert pair.context.stats.handoffs_done == 1 and pair.context.stats.handoffs_open == 0


def test_the_router_may_release(pair: Pair) -> None:
    handle = pair.prefill(prompt_of(10), greedy(4, ignore_eos=True)).handle
    pair.context.release(handle.handoff_id)
    pair.context.release(handle.handoff_id)
    pair.context.wait_baseline()
    assert pair.context.stats.handoffs_released == 1


def test_max_tokens_one_ends_on_the_context_worker(pair: Pair) -> None:
    result = pair.prefill(prompt_of(10), greedy(1, ignore_eos=True))
    assert result.choices() == expected(prompt_of(10), greedy(1, ignore_eos=True))
    assert result.choices()[0][1] == "length" and result.outputs[-1].handle is None
    pair.context.wait_baseline()
    assert pair.context.stats.handoffs_offered == 0


def ending_prompt() -> list[int]:
    return next(p for p in (prompt_of(6, seed) for seed in range(5000)) if expected(p, greedy(1))[0][0] == [EOS])


def test_eos_and_stop_ids_as_first_token_end_on_the_context_worker(pair: Pair) -> None:
    ending = ending_prompt()
    stopped = pair.prefill(ending, greedy(8))
    assert stopped.choices() == [([EOS], "stop")] and stopped.outputs[-1].handle is None
    sampling = greedy(8, ignore_eos=True, stop_token_ids=[EOS])
    stopped = pair.prefill(ending, sampling)
    assert stopped.choices() == [([EOS], "stop")] and stopped.outputs[0].stop_reason == EOS
    pair.context.wait_baseline()
    assert pair.context.stats.handoffs_offered == 0
    ignored = greedy(3, ignore_eos=True)
    assert pair.ask(ending, ignored).choices() == expected(ending, ignored)
    least = greedy(6, min_tokens=4)
    assert pair.ask(ending, least).choices() == expected(ending, least)


def test_choices_that_ended_with_their_first_token_are_not_decoded(pair: Pair) -> None:
    for seed in range(30):
        prompt = prompt_of(6, seed)
        firsts = [tokens[0] for tokens, _ in expected(prompt, SamplingParams(max_tokens=1, n=3, seed=seed))]
        sampling = SamplingParams(max_tokens=5, n=3, seed=seed, stop_token_ids=[firsts[seed % 3]])
        assert pair.ask(prompt, sampling).choices() == expected(prompt, sampling)
    pair.wait_baseline()


def test_salted_prompts_hand_off_and_stay_apart(pair: Pair) -> None:
    prompt = prompt_of(10)
    assert pair.ask(prompt, greedy(4), cache_salt="tenant").choices() == expected(prompt, greedy(4))
    assert pair.generation.ask(prompt, greedy(1)).cached_tokens == 0
    assert pair.generation.ask(prompt, greedy(1), cache_salt="tenant").cached_tokens == 8


# ------------------------------------------------------------------ failures


def changed(handle: Handle, **fields: object) -> Handle:
    return msgspec.structs.replace(handle, **fields)


def damage(kind: str, pair: Pair, handle: Handle) -> Handle:
    memory = handle.shared_memory
    assert memory is not None
    match kind:
        case "stale":
            for block in range(pair.context.blocks.num_blocks):
                pair.context.pages.bump(block)
            return handle
        case "stale tail":
            pair.context.pages.bump(handle.block_ids[-1])
            return handle
        case "other host":
            return changed(handle, shared_memory=msgspec.structs.replace(memory, host_id="else"))
        case "dead owner":
            return changed(handle, shared_memory=msgspec.structs.replace(memory, pid=2**22 - 1))
        case "new incarnation":
            return changed(handle, incarnation="before")
        case "no path":
            return changed(handle, shared_memory=None)
        case "wrong blocks":
            return changed(handle, block_ids=[1 << 40 for _ in handle.block_ids])
    raise AssertionError(kind)


FAILURES = {
    "stale": "stale",
    "stale tail": "stale",
    "other host": "shm",
    "dead owner": "shm",
    "new incarnation": "shm",
    "no path": "no_path",
    "wrong blocks": "shm",
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("length", [3, BLOCK, 70])
def test_a_failed_fetch_is_recomputed(pair: Pair, kind: str, length: int) -> None:
    for turn, sampling in enumerate(SAMPLINGS):
        prompt = prompt_of(length, turn)
        first = pair.prefill(prompt, sampling)
        handle = damage(kind, pair, first.handle)
        seen = len(pair.generation.fetched)
        result = pair.generation.ask(prompt, sampling, handle=handle)
        assert result.choices() == expected(prompt, sampling)
        [fetched] = pair.generation.fetched[seen:]
        assert not fetched.ok
        pair.context.release(first.handle.handoff_id)
    pair.wait_baseline()
    assert pair.generation.stats.fetch_failures.get(FAILURES[kind], 0) > 0


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("length", [3, 70])
def test_a_failed_fetch_can_be_an_error_instead(kind: str, length: int) -> None:
    with Worker("ctx") as context, Worker("gen", on_handoff_failure="fail") as generation:
        pair = Pair(context, generation)
        prompt = prompt_of(length)
        handle = damage(kind, pair, pair.prefill(prompt, greedy(4, ignore_eos=True)).handle)
        result = generation.ask(prompt, greedy(4, ignore_eos=True), handle=handle)
        assert result.error is not None and result.error.code == "handoff_refused" and not result.outputs
        generation.wait(lambda: generation.fetched)
        generation.wait_baseline()
        good = pair.ask(prompt_of(9), greedy(4, ignore_eos=True))
        assert good.choices() == expected(prompt_of(9), greedy(4, ignore_eos=True))


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"fingerprint": "e" * 32}, "handoff_refused", ["e" * 32, "f" * 32]),
        ({"prompt_tokens": 11}, "handoff_refused", ["11", "10"]),
        ({"prompt_digest": "0" * 32}, "handoff_refused", ["another prompt"]),
        ({"block_ids": [1], "generations": [1]}, "invalid_request_error", ["1 blocks"]),
    ],
)
def test_a_handle_that_does_not_fit_is_refused(
    pair: Pair, fields: dict[str, object], code: str, words: list[str]
) -> None:
    handle = pair.prefill(prompt_of(10), greedy(4, ignore_eos=True)).handle
    result = pair.generation.ask(prompt_of(10), greedy(4), handle=changed(handle, **fields))
    assert result.error is not None and result.error.code == code
    assert all(word in result.error.message for word in words)
    two = pair.generation.ask(prompt_of(10), greedy(4, n=2), handle=handle)
    assert two.error is not None and "starts for choices [0], n is 2" in two.error.message
    outside = msgspec.structs.replace(handle.starts[0], token=VOCAB)
    bad = pair.generation.ask(prompt_of(10), greedy(4), handle=changed(handle, starts=[outside]))
    assert bad.error is not None and "vocabulary" in bad.error.message
    both = pair.generation.ask(prompt_of(10), greedy(4), handle=handle, handoff_id=5)
    assert both.error is not None
    pair.generation.wait_baseline()


def test_an_unfetched_hand_off_expires_and_is_recomputed() -> None:
    with Worker("ctx", handoff_timeout=0.05) as context, Worker("gen") as generation:
        pair = Pair(context, generation)
        prompt = prompt_of(30)
        handle = pair.prefill(prompt, greedy(6, ignore_eos=True)).handle
        context.wait(lambda: context.stats.handoffs_expired == 1)
        context.wait_baseline()
        for seed in range(1, 9):  # new owners for all of its blocks
            context.ask(prompt_of(60, seed), greedy(40, ignore_eos=True))
        sampling = greedy(6, ignore_eos=True)
        assert pair.decode(prompt, sampling, handle).choices() == expected(prompt, sampling)
        assert generation.stats.fetch_failures == {"stale": 1}


def test_an_id_in_use_is_refused(pair: Pair) -> None:
    handle = pair.prefill(prompt_of(10), greedy(4, ignore_eos=True)).handle
    again = pair.context.ask(prompt_of(9), greedy(4), handoff_id=handle.handoff_id)
    assert again.error is not None and "in use" in again.error.message
    pair.context.wait_baseline(pinned=3)


def test_a_release_during_prefill_ends_the_prefill(pair: Pair) -> None:
    pair.context.delay(prefill_chunk=30)
    request_id = pair.context.submit(prompt_of(40), greedy(4), handoff_id=77)
    pair.context.wait(lambda: pair.context.stats.requests_running == 1)
    pair.context.release(77)
    error = pair.context.result(request_id).error
    assert error is not None and "released during prefill" in error.message
    pair.context.wait_baseline()


def test_a_release_before_the_request_arrives_pins_nothing(pair: Pair) -> None:
    pair.context.release(78)
    pair.context.ask(prompt_of(10), greedy(4, ignore_eos=True), handoff_id=78)
    pair.context.wait_baseline()
    assert pair.context.stats.handoffs_released == 1


def test_a_worker_reads_its_own_hand_off(pair: Pair) -> None:
    prompt, sampling = prompt_of(11), greedy(5, ignore_eos=True)
    own = Pair(pair.context, pair.context)
    assert own.ask(prompt, sampling).choices() == expected(prompt, sampling)
    pair.context.wait_baseline()


# ------------------------------------------------------------------ through the block store


@pytest.mark.parametrize("length", [3, BLOCK, 2 * BLOCK, 41])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_store_carries_full_blocks_and_the_tail_is_recomputed(length: int, sampling: SamplingParams) -> None:
    store = MemoryStore()
    with Worker("ctx", store=store) as context, Worker("gen", store=store, transfers=("pool",)) as generation:
        pair = Pair(context, generation)
        prompt = prompt_of(length)
        result = pair.ask(prompt, sampling)
        assert result.choices() == expected(prompt, sampling)
        timing = result.outputs[0].timing
        assert timing is not None and generation.fetched[-1].ok
        assert timing.fetch_path == ("pool" if length >= BLOCK else "recompute")
        pair.wait_baseline()
        assert generation.stats.prompt_tokens_pool == length // BLOCK * BLOCK
        assert generation.stats.prompt_tokens_computed == length % BLOCK
        assert set(block_keys(prompt, BLOCK)) <= set(store.values)


def test_the_store_outlives_the_context_worker() -> None:
    store = MemoryStore()
    prompt, sampling = prompt_of(41), greedy(5, ignore_eos=True)
    with Worker("ctx", store=store) as context:
        handle = context.ask(prompt, sampling, handoff_id=1).handle
        context.wait(lambda: context.stats.pool_put_blocks == 10)
    handle = damage("dead owner", Pair(context, context), handle)
    with Worker("gen", store=store) as generation:
        assert generation.ask(prompt, sampling, handle=handle).choices() == expected(prompt, sampling)
        generation.wait_baseline()
        assert generation.stats.fetch_failures == {"shm": 1} and generation.stats.prompt_tokens_pool == 40


def test_blocks_that_are_still_being_put_are_waited_for() -> None:
    store = MemoryStore()
    with Worker("ctx", store=store) as context, Worker("gen", store=store, transfers=("pool",)) as generation:
        pair = Pair(context, generation)
        context.delay(publish=0.1)
        prompt, sampling = prompt_of(41), greedy(5, ignore_eos=True)
        assert pair.ask(prompt, sampling).choices() == expected(prompt, sampling)
        pair.wait_baseline()
        assert generation.stats.prompt_tokens_pool == 40 and not generation.stats.fetch_failures
