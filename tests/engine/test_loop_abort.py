"""A cancel at every stage gives everything back at once, and leaves the others alone."""

from __future__ import annotations

import pytest
from engine_rig import MemoryStore, Worker, expected, greedy

from engine.messages import SamplingParams

PROMPT = [3 + (index * index) % 90 for index in range(42)]
SAMPLING = greedy(60, ignore_eos=True)
STAGES = ("queued", "prefill", "lookup", "fetch", "decode", "step", "publish")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_abort_returns_everything(stage: str, n: int) -> None:
    """The delays are far longer than the test may take: an abort does not wait for them."""
    store = MemoryStore() if stage in ("lookup", "publish") else None
    sampling = SamplingParams(max_tokens=20, n=n, ignore_eos=True)
    with Worker("ctx", num_blocks=64) as context, Worker("w", num_blocks=64, store=store) as worker:
        handle = context.ask(PROMPT, sampling, handoff_id=1).handle if stage == "fetch" else None
        others = []
        match stage:
            case "queued":
                worker.delay(step=60)
                others = [worker.submit([4, 5], greedy(2, ignore_eos=True)) for _ in range(8)]
            case "prefill":
                worker.delay(prefill_chunk=60)
            case "lookup" | "fetch":
                worker.delay(fetch=60)
            case "publish":
                worker.delay(publish=60)
        request_id = worker.submit(PROMPT, sampling, handle=handle)
        match stage:
            case "queued":
                worker.wait(lambda: worker.stats.requests_waiting >= 1)
            case "prefill":
                worker.wait(lambda: worker.stats.requests_running == 1)
            case "lookup" | "fetch":
                worker.wait(lambda: worker.stats.requests_fetching == 1)
            case _:
                worker.wait(lambda: worker.seen(request_id).outputs)
        if stage == "step":
            worker.delay(step=60)
        worker.abort(request_id)
        if stage == "publish":
            worker.wait(lambda: worker.stats.requests_running == 0)
        worker.delay()
        for other in others:
            assert worker.result(other).error is None
        worker.wait_baseline()
        outputs = len(worker.seen(request_id).outputs)
        if stage == "fetch":
            worker.wait(lambda: worker.fetched)
            assert [message.ok for message in worker.fetched] == [False]
        assert worker.ask(PROMPT, sampling).choices() == expected(PROMPT, sampling)
        assert len(worker.seen(request_id).outputs) == outputs


@pytest.mark.parametrize("stage", ["step", "prefill_chunk", "fetch"])
def test_an_abort_is_served_during_a_delay(stage: str) -> None:
    with Worker("w", store=MemoryStore()) as worker:
        worker.delay(**{stage: 60})
        request_id = worker.submit(PROMPT, SAMPLING)
        worker.wait(lambda: worker.stats.blocks_used > 0 or worker.stats.requests_running)
        worker.abort(request_id)
        worker.wait_baseline()


def test_a_queued_generation_request_lets_its_source_go() -> None:
    with Worker("ctx") as context, Worker("gen", max_batch_size=1) as generation:
        handle = context.ask(PROMPT, SAMPLING, handoff_id=1).handle
        generation.delay(step=60)
        generation.submit([4, 5], SAMPLING)
        generation.wait(lambda: generation.stats.requests_running == 1)
        waiting = generation.submit(PROMPT, SAMPLING, handle=handle)
        generation.wait(lambda: generation.stats.requests_waiting == 1)
        generation.abort(waiting)
        generation.wait(lambda: generation.fetched)
        assert not generation.fetched[0].ok and generation.fetched[0].handoff_id == 1


def test_blocks_being_written_belong_to_the_fetch_until_it_ends() -> None:
    """The store writes to its buffers long after the abort; nobody else may have got them meanwhile."""
    store = MemoryStore()
    with Worker("first", store=store) as first:
        first.ask(PROMPT, greedy(1))
        first.wait_baseline()
    store.slow = 0.25
    with Worker("second", num_blocks=32, store=store) as worker:
        aborted = worker.submit(PROMPT, greedy(1))
        worker.wait(lambda: "get" in store.calls)
        worker.abort(aborted)
        worker.wait(lambda: worker.stats.blocks_pinned == 10 and worker.stats.requests_fetching == 0)
        other = [5, 6, 7]
        assert worker.ask(other, SAMPLING).choices() == expected(other, SAMPLING)
        worker.wait_baseline()


def test_aborts_of_unknown_and_finished_requests_are_ignored() -> None:
    with Worker() as worker:
        worker.abort("never heard of")
        worker.ask(PROMPT, greedy(2))
        worker.abort("r0")
        assert worker.ask(PROMPT, greedy(2)).choices() == expected(PROMPT, greedy(2))
        worker.wait_baseline()


def test_many_aborts_under_load() -> None:
    store = MemoryStore()
    with Worker("ctx", store=store, num_blocks=48) as context, Worker("gen", store=store, num_blocks=48) as generation:
        for turn in range(60):
            prompt = [3 + turn % 80, *PROMPT[: turn % 40]]
            sampling = SamplingParams(max_tokens=8, seed=turn, n=1 + turn % 2, ignore_eos=True)
            first = context.ask(prompt, sampling, handoff_id=100 + turn)
            kept = generation.submit(prompt, sampling, handle=first.handle)
            dropped = [generation.submit(prompt, sampling, handle=first.handle), context.submit(prompt, sampling)]
            generation.abort(dropped[0])
            context.abort(dropped[1])
            assert generation.result(kept).choices() == expected(prompt, sampling)
            context.release(100 + turn)
        context.wait_baseline()
        generation.wait_baseline()
