"""The mock engine: scripted answers, modelled times on a clock that is moved by hand, and faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.client import OutputStream
from engine.config import EngineConfig
from engine.messages import HandoffFetched, Output, SamplingParams, Submit
from engine.mock import MockEngine, MockNetwork
from engine.mock_clock import RealClock, VirtualClock
from engine.mock_profile import Answer, Faults, MockProfile, Script, StepTimes
from engine.step import Chunk
from kvstore.errors import InternalError, NotReady
from kvstore.protocol import KvEvent

EOS = 2
PROMPT = list(range(10, 110))
TIMES = StepTimes(prefill_a=0.0, prefill_b=0.001, prefill_c=0.0, decode=((0.0, 0.01), (1.0, 0.01)))


def engine(clock: VirtualClock | None = None, network: MockNetwork | None = None, **profile: Any) -> MockEngine:
    settings = profile.pop("settings", {})
    config = EngineConfig("mock", endpoint="127.0.0.1:1", **{"num_blocks": 64, "max_num_tokens": 64} | settings)
    profile.setdefault("times", TIMES)
    return MockEngine(config, MockProfile(**profile), 200, [EOS], clock or VirtualClock(), network)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


async def collect(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


def tokens(outputs: Sequence[Output], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


async def ask(mock: MockEngine, clock: VirtualClock, submit: Submit) -> tuple[list[Output], float]:
    """The outputs, and the modelled seconds until the last."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(collect(mock.submit(submit)))
        seconds = await clock.run_until(task.done)
    return task.result(), seconds


# ---------------------------------------------------------------- answers


async def test_a_scripted_prompt_has_its_answer_and_ends_with_eos() -> None:
    clock = VirtualClock()
    mock = engine(clock, answers=[Answer(PROMPT, [7, 8, 9])])
    outputs, _ = await ask(mock, clock, Submit("a", PROMPT, greedy(20)))
    assert tokens(outputs) == [7, 8, 9, EOS] and outputs[-1].finish_reason == "stop"


async def test_other_prompts_have_answers_of_their_own_the_same_everywhere() -> None:
    clock = VirtualClock()
    one, other = engine(clock), engine(clock, times=StepTimes())
    sampled = SamplingParams(max_tokens=9, seed=5, n=2)
    for sampling in (greedy(9), sampled):
        first, _ = await ask(one, clock, Submit(f"a{sampling.n}", PROMPT, sampling))
        again, _ = await ask(other, clock, Submit(f"b{sampling.n}", PROMPT, sampling))
        for index in range(sampling.n):
            assert tokens(first, index) == tokens(again, index) and len(tokens(first, index)) == 9
            assert EOS not in tokens(first, index)
    assert tokens(first, 0) != tokens(first, 1)
    outputs, _ = await ask(one, clock, Submit("c", PROMPT[1:], greedy(9)))
    assert tokens(outputs) != tokens(first)


async def test_min_tokens_and_logprobs_are_honoured() -> None:
    clock = VirtualClock()
    mock = engine(clock, answers=[Answer(PROMPT, [])])
    outputs, _ = await ask(mock, clock, Submit("a", PROMPT, greedy(9, min_tokens=3, logprobs=1)))
    assert len(tokens(outputs)) == 4 and tokens(outputs)[-1] == EOS
    assert all(output.logprobs for output in outputs)


# ---------------------------------------------------------------- times


async def test_times_are_those_of_the_model() -> None:
    clock = VirtualClock()
    mock = engine(clock)
    outputs, seconds = await ask(mock, clock, Submit("a", PROMPT, greedy(5, ignore_eos=True)))
    assert seconds == pytest.approx(100 * 0.001 + 4 * 0.01)
    assert outputs[0].timing is not None and outputs[0].timing.first_token == pytest.approx(0.1)
    _, cached = await ask(mock, clock, Submit("b", PROMPT, greedy(5, ignore_eos=True)))
    assert cached == pytest.approx(4 * 0.001 + 4 * 0.01), "three whole blocks came from the prefix cache"


def test_a_step_adds_prompts_and_decodes() -> None:
    times = StepTimes(prefill_a=1e-6, prefill_b=1e-4, prefill_c=1e-3, decode=((0.0, 0.01), (0.5, 0.02), (1.0, 0.05)))
    prompt, later = Chunk([0] * 10, 0, [], True), Chunk([0] * 10, 10, [], True)
    assert times.step([prompt], [False], 100) == pytest.approx(1e-4 + 1e-3 + 1e-3)
    assert times.step([later], [False], 100) == pytest.approx(3e-4 + 1e-3 + 1e-3)
    decode = Chunk([0], 24, [], True)
    assert times.step([decode], [True], 100) == pytest.approx(0.015)
    assert times.step([decode] * 3, [True] * 3, 100) == pytest.approx(0.02 + 0.03 / 2)
    assert times.step([decode] * 9, [True] * 9, 100) == pytest.approx(0.05)
    assert times.step([prompt, decode], [False, True], 100) == pytest.approx(0.0021 + 0.015)
    assert StepTimes(decode=((0.0, 0.01),), speed=10).step([decode], [True], 100) == pytest.approx(0.001)


def test_a_measured_table_of_prompts_replaces_the_formula() -> None:
    times = StepTimes(prefill=((0, 0.0), (100, 0.01), (200, 0.03)), prefill_c=0.0)

    def seconds(start: int, end: int) -> float:
        return times.step([Chunk([0] * (end - start), start, [], True)], [False], 1000)

    assert seconds(0, 50) == pytest.approx(0.005) and seconds(0, 200) == pytest.approx(0.03)
    assert seconds(50, 150) == pytest.approx(0.015), "a chunk costs the difference"
    assert seconds(0, 300) == pytest.approx(0.05), "beyond the table its last slope goes on"


async def test_an_idle_engine_has_no_timer() -> None:
    clock = VirtualClock()
    mock = engine(clock)
    await ask(mock, clock, Submit("a", PROMPT, greedy(3)))
    await clock.run(1)
    assert mock._timer is None


async def test_the_real_clock_takes_its_time() -> None:
    mock = MockEngine(EngineConfig("mock", num_blocks=64), MockProfile(times=TIMES), 200, [EOS], RealClock())
    begin = asyncio.get_running_loop().time()
    outputs = await asyncio.wait_for(collect(mock.submit(Submit("a", PROMPT, greedy(6, ignore_eos=True)))), 10)
    assert len(tokens(outputs)) == 6
    assert asyncio.get_running_loop().time() - begin >= 0.14
    await mock.close()


async def test_a_hundred_engines_in_one_process() -> None:
    clock = VirtualClock()
    engines = [engine(clock) for _ in range(100)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(collect(each.submit(Submit(f"r{index}", [*PROMPT, index], greedy(10)))))
            for index, each in enumerate(engines)
        ]
        await clock.run_until(lambda: all(task.done() for task in tasks), patience=3)
    assert all(len(tokens(task.result())) == 10 for task in tasks)


# ---------------------------------------------------------------- hand-offs


async def hand_off(network: MockNetwork, clock: VirtualClock, **context: Any) -> tuple[MockEngine, MockEngine, Output]:
    first, second = engine(clock, network, **context), engine(clock, network)
    outputs, _ = await ask(first, clock, Submit("c", PROMPT, greedy(8), handoff_id=2**41))
    assert outputs[-1].finish_reason == "not_finished" and outputs[-1].handle is not None
    return first, second, outputs[-1]


async def test_a_hand_off_goes_on_where_the_prefill_ended() -> None:
    clock, network = VirtualClock(), MockNetwork()
    context, generation, last = await hand_off(network, clock)
    reports: list[HandoffFetched] = []
    generation.on_handoff_fetched = reports.append
    outputs, seconds = await ask(generation, clock, Submit("g", PROMPT, greedy(8), handle=last.handle))
    alone, _ = await ask(engine(clock), clock, Submit("x", PROMPT, greedy(8)))
    assert tokens(outputs) == tokens(alone)
    fetch = TIMES.fetch(4 * generation.ready.block_bytes)
    assert seconds == pytest.approx(fetch + 7 * 0.01)
    assert [report.ok for report in reports] == [True]
    assert context.stats.blocks_pinned == 4
    context.release_handoff(2**41, context.incarnation)
    await clock.run(1)
    assert context.stats.blocks_pinned == 0 and context.stats.handoffs_done == 1


async def test_an_offer_that_nobody_takes_ends_on_the_virtual_clock() -> None:
    clock, network = VirtualClock(), MockNetwork()
    context, _, _ = await hand_off(network, clock)
    await clock.run(61)
    assert context.stats.handoffs_expired == 1 and context.stats.blocks_pinned == 0


@pytest.mark.parametrize("dead", [True, False])
async def test_pages_that_are_gone_are_computed_again(dead: bool) -> None:
    clock, network = VirtualClock(), MockNetwork()
    context, generation, last = await hand_off(network, clock)
    if dead:
        context.die()
    else:
        context.release_handoff(2**41)
        await clock.run(1)
    outputs, seconds = await ask(generation, clock, Submit("g", PROMPT, greedy(8), handle=last.handle))
    alone, _ = await ask(engine(clock), clock, Submit("x", PROMPT, greedy(8)))
    assert tokens(outputs) == tokens(alone) and seconds >= 0.1
    assert generation.stats.fetch_failures == {"shm" if dead else "stale": 1}


async def test_a_cancelled_fetch_leaves_nothing() -> None:
    clock, network = VirtualClock(), MockNetwork()
    _, generation, last = await hand_off(network, clock)
    generation.set_delays({"fetch": 100.0})
    stream = generation.submit(Submit("g", PROMPT, greedy(8), handle=last.handle))
    await clock.run(0.5)
    stream.close()
    await clock.run(0.5)
    assert generation.stats.blocks_used == 0 == generation.stats.requests_fetching


# ---------------------------------------------------------------- faults


async def test_it_dies_at_a_token() -> None:
    clock = VirtualClock()
    mock = engine(clock, faults=Faults(die_at_token=3, restart_after=5.0))
    task = asyncio.create_task(collect(mock.submit(Submit("a", PROMPT, greedy(20, ignore_eos=True)))))
    await clock.run_until(task.done)
    with pytest.raises(InternalError):
        await task
    assert not mock.alive and mock.restart_after == 5.0
    await asyncio.wait_for(mock.wait_dead(), 1)
    with pytest.raises(NotReady):
        mock.submit(Submit("b", PROMPT, greedy(1)))


async def test_a_step_stalls() -> None:
    clock = VirtualClock()
    mock = engine(clock, faults=Faults(stall_steps={2: 30.0}))
    _, seconds = await ask(mock, clock, Submit("a", PROMPT[:50], greedy(5, ignore_eos=True)))
    assert seconds == pytest.approx(0.05 + 4 * 0.01 + 30.0)


async def test_events_follow_a_snapshot_and_can_be_lost() -> None:
    clock = VirtualClock()
    mock = engine(clock, faults=Faults(drop_events=[2]), settings={"num_blocks": 8})
    seen: list[KvEvent] = []

    async def watch() -> None:
        async for event in mock.subscribe_events():
            seen.append(event)

    watcher = asyncio.create_task(watch())
    await clock.run(0.1)
    for index in range(3):
        await ask(mock, clock, Submit(f"r{index}", [10 + index] * 70, greedy(1)))
    assert seen[0].cleared
    stored = [event for event in seen[1:] if event.stored]
    assert len(stored) == 2
    mock.die()
    await asyncio.wait_for(watcher, 1)


async def test_a_new_one_in_its_place_is_empty_and_another() -> None:
    clock = VirtualClock()
    first = engine(clock)
    await ask(first, clock, Submit("a", PROMPT, greedy(1)))
    first.die()
    second = engine(clock)
    assert second.ready.incarnation != first.ready.incarnation
    outputs, _ = await ask(second, clock, Submit("a", PROMPT, greedy(1)))
    assert outputs[0].cached_tokens == 0


async def test_a_virtual_clock_says_when_nothing_is_left_to_happen() -> None:
    clock = VirtualClock()
    with pytest.raises(TimeoutError):
        await clock.run_until(lambda: False)
    fired: list[int] = []
    clock.call_later(1.0, lambda: fired.append(1)).cancel()
    clock.call_later(2.0, lambda: fired.append(2))
    await clock.run(5)
    assert fired == [2] and clock.time() == 1005.0


def test_a_script_keeps_to_the_vocabulary() -> None:
    script = Script([], vocab_size=8, eos=EOS)
    digest = script.digest([1])
    assert {script.token(digest, position, 0) for position in range(200)} == {3, 4, 5, 6, 7}
    assert all(script.token(digest, position, 0, banned=(3, 4, 5, 6)) == 7 for position in range(20))
