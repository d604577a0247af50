"""MAX_UTILIZATION, priorities and fairness: who gives way, and that it changes no answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_rig import MemoryStore, Worker, expected, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.messages import SamplingParams, Submit
from engine.rules import Rules
from engine.scheduler import Scheduler
from engine.sequence import Capacity, Choice, ModelFacts, Phase, Request, open_request

FACTS = ModelFacts("f", 100, 400, frozenset({2}))
BLOCK = 4


def scheduler(num_blocks: int = 16, max_batch_size: int = 4, max_num_tokens: int = 8, **rules: Any) -> Scheduler:
    capacity = Capacity(num_blocks, BLOCK, max_batch_size)
    return Scheduler(BlockPool(num_blocks), capacity, max_num_tokens, Rules(**rules))


def request(on: Scheduler, name: str, prompt: list[int], max_tokens: int, n: int = 1, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    opened = open_request(Submit(name, prompt, sampling, **more), 0.0, FACTS, on.capacity)
    on.add(opened)
    return opened


def admit_all(on: Scheduler) -> list[str]:
    on.resume()
    admitted = []
    while (next_one := on.admit()) is not None:
        on.start(next_one)
        admitted.append(next_one.id)
    return admitted


def step(on: Scheduler, token: int = 7) -> dict[str, int]:
    """One step in which every draw gives `token`; returns the tokens that each request had computed."""
    batch = on.schedule()
    choices, _, _ = batch.draws()
    sizes: dict[str, int] = {}
    for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
        on.advance(choice, len(chunk.tokens))
        sizes[choice.request.id] = sizes.get(choice.request.id, 0) + len(chunk.tokens)
    fresh = {choice.request: None for choice in choices if not choice.generated}
    for choice in choices:
        choice.append(token)
        if choice.request not in fresh and choice.finish_reason:
            on.finish(choice)
    for each in fresh:
        on.fork(each)
    return sizes


def drain(on: Scheduler, limit: int = 2000) -> None:
    for _ in range(limit):
        admit_all(on)
        if not on.busy:
            break
        step(on)
    assert not on.running and not on.waiting and not on.paused
    assert on._places == on.blocks.reserved == on.blocks.used == 0


# ---------------------------------------------------------------- MAX_UTILIZATION


def test_admission_counts_what_is_needed_now() -> None:
    careful, bold = scheduler(num_blocks=10), scheduler(num_blocks=10, preempts=True)
    for on in (careful, bold):
        for name in "abc":
            request(on, name, [ord(name) - 90] * 4, max_tokens=20)
    assert admit_all(careful) == ["a"]
    assert admit_all(bold) == ["a", "b", "c"]


def test_the_youngest_gives_way_and_comes_back_before_newer_ones() -> None:
    on = scheduler(num_blocks=8, preempts=True)
    a = request(on, "a", [5] * 8, max_tokens=20)
    b = request(on, "b", [6] * 8, max_tokens=20)
    c = request(on, "c", [7] * 20, max_tokens=2)
    while not on.preemptions:
        admit_all(on)
        step(on)
    assert [choice.request for choice in on.paused] == [b] and c.phase is Phase.WAITING
    assert b.choices[0].computed == 0 and not b.choices[0].table and a.choices[0].table
    order: list[str] = []
    for _ in range(200):
        admit_all(on)
        if not on.busy:
            break
        order += step(on)
    assert order.index("c") > max(index for index, name in enumerate(order) if name == "a")
    drain(on)


def test_the_lowest_priority_gives_way_whatever_its_age() -> None:
    on = scheduler(num_blocks=8, preempts=True, by_priority=True)
    low = request(on, "low", [5] * 8, max_tokens=20, priority=0.1)
    admit_all(on)
    request(on, "high", [6] * 8, max_tokens=20, priority=0.9)
    while not on.preemptions:
        admit_all(on)
        step(on)
    assert [choice.request for choice in on.paused] == [low]
    drain(on)


def test_one_that_fills_the_pool_alone_is_served() -> None:
    on = scheduler(num_blocks=6, preempts=True)
    request(on, "a", [5] * 4, max_tokens=21)
    request(on, "b", [6] * 4, max_tokens=21, n=1)
    drain(on)
    assert on.preemptions


ACTIONS = st.one_of(
    st.tuples(
        st.just("add"), st.integers(0, 2), st.integers(1, 12), st.integers(1, 9), st.integers(1, 3),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    st.tuples(st.just("step"), st.integers(3, 9)),
    st.tuples(st.just("end"), st.integers(0, 5)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.booleans(), st.booleans())
def test_any_load_ends_and_leaves_nothing(actions: list[tuple[Any, ...]], by_priority: bool, part: bool) -> None:
    on = scheduler(14, 5, 6, preempts=True, by_priority=by_priority, partial_reuse=part, prefix_aware=part)
    alive: list[Request] = []
    for number, action in enumerate(actions):
        match action:
            case ("add", kind, length, max_tokens, n, priority):
                alive.append(request(on, str(number), [5 + kind] * length, max_tokens, n, priority=priority))
            case ("step", token):
                step(on, token)
            case ("end", index) if alive:
                victim = alive.pop(index % len(alive))
                if victim.phase is not Phase.ENDED:
                    on.end(victim)
        admit_all(on)
        check(on, alive)
    drain(on)


def check(on: Scheduler, alive: list[Request]) -> None:
    choices: list[Choice] = [choice for each in alive for choice in each.choices]
    assert on.blocks.reserved == sum(choice.reserved for choice in choices) <= on.blocks.available
    assert on.blocks.used == len({block for choice in choices for block in choice.table})
    assert len(on.running) <= on._places == sum(e.places for e in alive if e.phase is Phase.RUNNING) <= 5
    assert not set(map(id, on.running)) & set(map(id, on.paused))
    for choice in on.paused:
        assert not choice.table and not choice.reserved and choice.finish_reason is None


# ---------------------------------------------------------------- the same answers


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams, float]]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    shared = [rng.randrange(3, 97) for _ in range(10)]
    made = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = shared[: rng.choice((0, 3, 6, 10))] + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 20))]
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(99),
            n=rng.choice((1, 1, 2, 3)),
            min_tokens=rng.choice((0, 1)),
        )
        made.append((prompt, sampling, rng.random()))
    return made


@settings(max_examples=40, deadline=None)
@given(workloads(), st.sampled_from(["fcfs", "priority"]), st.sampled_from([3, 7, 16]), st.sampled_from([0, 12]))
def test_preempted_answers_are_those_of_a_lone_request(
    work: list[tuple[list[int], SamplingParams, float]], waiting: str, budget: int, host: int
) -> None:
    settings = {
        "capacity_policy": "MAX_UTILIZATION", "waiting_policy": waiting, "max_num_tokens": budget,
        "host_cache_size": host * BLOCK * 8,
    }  # fmt: skip
    with Worker(num_blocks=26, **settings) as worker:
        asked = [worker.submit(prompt, sampling, priority=priority) for prompt, sampling, priority in work]
        for request_id, (prompt, sampling, _) in zip(asked, work, strict=True):
            result = worker.result(request_id)
            if result.error is None:
                assert result.choices() == expected(prompt, sampling)
        worker.wait_baseline()


@settings(max_examples=20, deadline=None)
@given(workloads(), st.booleans())
def test_preempted_answers_of_hand_offs_are_those_of_a_lone_request(
    work: list[tuple[list[int], SamplingParams, float]], host: bool
) -> None:
    """Both workers are short of blocks; the generation worker computes prompts again that it had fetched."""
    tight = {"capacity_policy": "MAX_UTILIZATION", "num_blocks": 26, "host_cache_size": host * 12 * BLOCK * 8}
    with Worker("ctx", **tight) as context, Worker("gen", **tight) as generation:
        first = [context.submit(*each[:2], handoff_id=2**41 + index) for index, each in enumerate(work)]
        asked: list[str | None] = []
        for index, (prompt, sampling, _) in enumerate(work):
            result = context.result(first[index])
            if result.error is not None or result.outputs[-1].handle is None:
                asked.append(None)
                continue
            asked.append(generation.submit(prompt, sampling, handle=result.handle))
            let_go(generation, str(asked[-1]))
            context.release(2**41 + index)
        for request_id, (prompt, sampling, _) in zip(asked, work, strict=True):
            if request_id is not None and generation.result(request_id).error is None:
                assert generation.result(request_id).choices() == expected(prompt, sampling)
        generation.wait_baseline()
        context.wait_baseline()


def let_go(generation: Worker, request_id: str) -> None:
    """Wait until the reader needs the source no more, or has refused."""
    done = lambda: any(each.request_id == request_id for each in generation.fetched)  # noqa: E731
    generation.wait(lambda: done() or generation.seen(request_id).error is not None)


def test_the_small_pool_of_that_test_does_preempt() -> None:
    with Worker(num_blocks=24, capacity_policy="MAX_UTILIZATION") as worker:
        prompts = [[5 + k, *range(10, 20)] for k in range(6)]
        asked = [worker.submit(prompt, greedy(40, ignore_eos=True)) for prompt in prompts]
        for request_id, prompt in zip(asked, prompts, strict=True):
            assert worker.result(request_id).choices() == expected(prompt, greedy(40, ignore_eos=True))
        assert worker.loop.scheduler.preemptions


def test_a_preempted_request_can_be_aborted() -> None:
    with Worker(num_blocks=24, capacity_policy="MAX_UTILIZATION") as worker:
        asked = [worker.submit([5 + k, *range(10, 20)], greedy(60, ignore_eos=True)) for k in range(6)]
        worker.wait(lambda: worker.loop.scheduler.paused)
        for request_id in asked:
            worker.abort(request_id)
        worker.wait_baseline()


# ---------------------------------------------------------------- order and fairness


def test_priority_orders_the_queue_and_arrival_breaks_ties() -> None:
    on = scheduler(num_blocks=64, max_batch_size=1, by_priority=True)
    for name, priority in (("a", 0.5), ("b", 0.9), ("c", 0.5), ("d", 0.9)):
        request(on, name, [5], max_tokens=1, priority=priority)
    assert [each.id for each in on.waiting] == ["b", "d", "a", "c"]


def test_without_the_policy_priority_is_not_looked_at() -> None:
    on = scheduler(num_blocks=64, max_batch_size=1)
    request(on, "a", [5], max_tokens=1, priority=0.0)
    request(on, "b", [5], max_tokens=1, priority=1.0)
    assert [each.id for each in on.waiting] == ["a", "b"]


@pytest.mark.parametrize("prompt", [40, 200])
def test_a_long_prompt_stops_no_decode(prompt: int) -> None:
    on = scheduler(num_blocks=200, max_batch_size=8, max_num_tokens=16)
    for name in "abc":
        request(on, name, [5], max_tokens=60)
    admit_all(on)
    step(on)
    request(on, "long", [6] * prompt, max_tokens=2)
    while on.waiting or any(choice.request.id == "long" for choice in on.running):
        admit_all(on)
        sizes = step(on)
        assert all(sizes.get(name) == 1 for name in "abc")


def test_decodes_that_fill_the_step_take_turns_and_leave_a_quarter_to_prompts() -> None:
    on = scheduler(num_blocks=400, max_batch_size=8, max_num_tokens=8)
    for index in range(7):
        request(on, f"d{index}", [5], max_tokens=100)
    while any(not choice.generated for choice in on.running) or on.waiting:
        admit_all(on)
        step(on)
    request(on, "p", [6] * 60, max_tokens=1)
    admit_all(on)
    steps = 0
    counts: dict[str, int] = {}
    while any(choice.request.id == "p" for choice in on.running):
        sizes = step(on)
        steps += 1
        for name, size in sizes.items():
            counts[name] = counts.get(name, 0) + size
    assert steps <= 60 / 2 + 1
    decoded = [counts[f"d{index}"] for index in range(7)]
    assert max(decoded) - min(decoded) <= 1 and sum(decoded) >= 6 * (steps - 1)


def test_a_short_prompt_waits_for_no_long_one() -> None:
    on = scheduler(num_blocks=400, max_batch_size=8, max_num_tokens=32)
    request(on, "long", [6] * 300, max_tokens=1)
    admit_all(on)
    step(on)
    short = request(on, "short", [7] * 8, max_tokens=5)
    admit_all(on)
    sizes = step(on)
    assert sizes == {"short": 8, "long": 24} and short.choices[0].generated == 1


def test_a_prompt_that_is_handed_off_keeps_its_blocks() -> None:
    on = scheduler(num_blocks=11, max_num_tokens=4, preempts=True)
    request(on, "a", [5] * 4, max_tokens=30)
    request(on, "b", [6] * 4, max_tokens=30)
    admit_all(on)
    for _ in range(3):
        step(on)
    offered = request(on, "c", [7] * 24, max_tokens=1, handoff_id=1)
    admit_all(on)
    assert offered.phase is Phase.RUNNING
    while not on.preemptions:
        assert offered.choices[0].pending or offered.choices[0].generated
        step(on)
    assert offered.choices[0].table and [choice.request.id for choice in on.paused] == ["b"]


# ---------------------------------------------------------------- prompts with a common beginning


def test_a_prompt_waits_for_one_that_is_computing_its_beginning() -> None:
    on = scheduler(num_blocks=200, max_batch_size=8, max_num_tokens=32, prefix_aware=True)
    system = [9] * 64
    request(on, "a", [*system, 20], max_tokens=3)
    assert admit_all(on) == ["a"]
    for name in "bc":
        request(on, name, [*system, ord(name)], max_tokens=3)
    request(on, "other", [8] * 40, max_tokens=3)
    assert admit_all(on) == ["other"], "who needs nothing of it passes"
    sizes: dict[str, int] = {}
    while on.waiting:
        for name, tokens in step(on).items():
            sizes[name] = sizes.get(name, 0) + tokens
        admit_all(on)
    for name, tokens in step(on).items():
        sizes[name] = sizes.get(name, 0) + tokens
    assert sizes["a"] >= 65 and sizes["b"] == sizes["c"] == 1
    drain(on)


@pytest.mark.parametrize("shared", [4, 15])
def test_a_few_common_tokens_are_not_waited_for(shared: int) -> None:
    on = scheduler(num_blocks=200, max_batch_size=8, max_num_tokens=32, prefix_aware=True)
    request(on, "a", [9] * shared + [5] * 60, max_tokens=3)
    request(on, "b", [9] * shared + [6] * 60, max_tokens=3)
    assert admit_all(on) == ["a", "b"]


def test_who_waits_goes_on_when_the_other_one_is_gone() -> None:
    on = scheduler(num_blocks=200, max_batch_size=8, max_num_tokens=32, prefix_aware=True)
    first = request(on, "a", [9] * 100, max_tokens=3)
    request(on, "b", [9] * 100, max_tokens=3)
    assert admit_all(on) == ["a"]
    on.end(first)
    assert admit_all(on) == ["b"]
    drain(on)


def test_a_herd_computes_its_prefix_once() -> None:
    with Worker(num_blocks=256, max_num_tokens=32, max_batch_size=8) as worker:
        system = [3 + index % 90 for index in range(72)]
        prompts = [[*system, 10 + index] for index in range(8)]
        asked = [worker.submit(prompt, greedy(4, ignore_eos=True)) for prompt in prompts]
        for request_id, prompt in zip(asked, prompts, strict=True):
            assert worker.result(request_id).choices() == expected(prompt, greedy(4, ignore_eos=True))
        worker.wait_baseline()
        assert worker.stats.prompt_tokens_computed < 2 * 73


def test_blocks_that_a_slow_store_is_reading_are_waited_for() -> None:
    """Nothing can be preempted for them: the request gives up its own, and goes on when the store has let go."""
    with Worker(num_blocks=12, store=MemoryStore(), capacity_policy="MAX_UTILIZATION") as worker:
        worker.delay(publish=0.2)
        prompts = [[5 + k, *range(10, 34)] for k in range(3)]
        asked = [worker.submit(prompt, greedy(20, ignore_eos=True)) for prompt in prompts]
        for request_id, prompt in zip(asked, prompts, strict=True):
            assert worker.result(request_id).choices() == expected(prompt, greedy(20, ignore_eos=True))
        worker.delay()
        worker.wait_baseline()
