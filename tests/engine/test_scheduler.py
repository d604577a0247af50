"""The scheduler alone: places, reservations and chunks, with no loop around it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.messages import SamplingParams, Submit
from engine.scheduler import Scheduler
from engine.sequence import Capacity, Choice, ModelFacts, Phase, Request, open_request
from kvstore.errors import ContextLengthExceeded

FACTS = ModelFacts("f", 100, 200, frozenset({2}))
BLOCK = 4


def scheduler(num_blocks: int = 16, max_batch_size: int = 4, max_num_tokens: int = 8) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), Capacity(num_blocks, BLOCK, max_batch_size), max_num_tokens)


def request(on: Scheduler, name: str, prompt: list[int], max_tokens: int, n: int = 1, **more: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    opened = open_request(Submit(name, prompt, sampling, **more), 0.0, FACTS, on.capacity)
    on.add(opened)
    return opened


def admit_all(on: Scheduler) -> list[Request]:
    admitted = []
    while (next_one := on.admit()) is not None:
        on.start(next_one)
        admitted.append(next_one)
    return admitted


def step(on: Scheduler, token: int = 7) -> list[Choice]:
    """One step in which every draw gives `token`; returns the choices that were given one."""
    batch = on.schedule()
    choices, _, _ = batch.draws()
    for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
        on.advance(choice, len(chunk.tokens))
    fresh = {choice.request for choice in choices if not choice.generated}
    for choice in choices:
        choice.append(token)
        if choice.request not in fresh and choice.finish_reason:
            on.finish(choice)
    for each in fresh:
        if each.handoff_id is not None:
            on.end(each)
        else:
            on.fork(each)
    return choices


def test_the_reservation_is_for_all_that_a_request_may_need() -> None:
    on = scheduler(num_blocks=16)
    a = request(on, "a", [5] * 9, max_tokens=8)  # 16 positions: the last token's KV is never needed
    b = request(on, "b", [6] * 9, max_tokens=9)  # 17
    c = request(on, "c", [7] * 9, max_tokens=9, n=3)  # 2 shared blocks and 3 more a choice
    assert [each.blocks_needed for each in (a, b, c)] == [4, 5, 11]
    assert request(on, "d", [8] * 9, max_tokens=9, n=3, handoff_id=1).blocks_needed == 3
    assert admit_all(on) == [a, b]
    assert on.blocks.reserved == 9


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    on = scheduler(num_blocks=8)
    first = request(on, "a", [5] * 9, max_tokens=8)
    large = request(on, "b", [6] * 9, max_tokens=20)
    small = request(on, "c", [7], max_tokens=1)
    assert admit_all(on) == [first] and list(on.waiting) == [large, small]
    on.end(first)
    assert admit_all(on) == [large, small]


def test_places_are_counted_by_choices_before_they_exist() -> None:
    on = scheduler(max_batch_size=4, num_blocks=64)
    three = request(on, "a", [5] * 3, max_tokens=3, n=3)
    two = request(on, "b", [6] * 3, max_tokens=3, n=2)
    assert admit_all(on) == [three]
    for _ in range(3):
        step(on)
    assert admit_all(on) == [two] and on.blocks.reserved > 0


def test_a_context_only_request_takes_one_place_for_all_choices() -> None:
    on = scheduler(max_batch_size=4, num_blocks=64)
    one = request(on, "a", [5] * 3, max_tokens=3, n=4, handoff_id=1)
    other = request(on, "b", [6] * 3, max_tokens=3, n=3)
    assert admit_all(on) == [one, other]


def test_decodes_come_first_and_prompts_share_what_is_left_in_order() -> None:
    on = scheduler(num_blocks=64, max_num_tokens=8)
    request(on, "a", [5] * 3, max_tokens=9)
    admit_all(on)
    step(on)
    request(on, "b", [6] * 10, max_tokens=2)
    request(on, "c", [7] * 10, max_tokens=2)
    admit_all(on)
    sizes = []
    for _ in range(4):
        batch = on.schedule()
        sizes.append([(choice.request.id, len(chunk.tokens)) for choice, chunk in zip(batch.choices, batch.chunks)])  # noqa: B905
        for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
            on.advance(choice, len(chunk.tokens))
            if not choice.pending:
                choice.append(7)
    assert sizes[0] == [("a", 1), ("b", 4)]  # a chunk that is not the last ends with its block
    assert sizes[1] == [("a", 1), ("b", 6)]
    assert sizes[2] == [("a", 1), ("b", 1), ("c", 4)]


def test_only_the_end_of_a_prompt_wants_logits() -> None:
    on = scheduler(num_blocks=64, max_num_tokens=8)
    request(on, "a", [5] * 20, max_tokens=2)
    admit_all(on)
    wants = []
    for _ in range(4):
        wants += [chunk.wants_logits for chunk in on.schedule().chunks]
        step(on)
    assert wants == [False, False, True, True]


def test_a_cached_prefix_is_acquired_and_the_rest_computed() -> None:
    on = scheduler(num_blocks=16)
    first = request(on, "a", [5] * 9, max_tokens=1)
    admit_all(on)
    step(on), step(on)
    assert first.phase is Phase.ENDED and not on.running
    second = request(on, "b", [5] * 8 + [6], max_tokens=1)
    third = request(on, "c", [5] * 8, max_tokens=1)
    admit_all(on)
    assert second.choices[0].computed == 8 and third.choices[0].computed == 4
    assert on.blocks.used == 2


def test_refused_by_name_and_number() -> None:
    on = scheduler(num_blocks=4)
    with pytest.raises(ContextLengthExceeded, match="need 5 KV blocks of 4 tokens, of 4 here") as caught:
        request(on, "a", [5] * 10, max_tokens=10)
    assert caught.value.param == "max_tokens"


def test_repr_tells_the_state() -> None:
    on = scheduler()
    request(on, "a", [5] * 3, max_tokens=3)
    assert "waiting 1" in repr(on)
    [admitted] = admit_all(on)
    assert "running 1" in repr(on) and "0/3 tokens" in repr(admitted)


PROMPTS = st.tuples(st.integers(0, 1), st.integers(1, 12))
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 6), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("step"), st.integers(3, 9)),
    st.tuples(st.just("end"), st.integers(0, 5)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=50))
def test_any_load_keeps_its_promises_and_leaves_nothing(actions: list[tuple[object, ...]]) -> None:
    on = scheduler(num_blocks=14, max_batch_size=5, max_num_tokens=6)
    alive: list[Request] = []
    for number, action in enumerate(actions):
        match action:
            case ("add", (kind, length), max_tokens, n, offered):
                try:
                    more = {"handoff_id": number} if offered else {}
                    alive.append(request(on, str(number), [5 + kind] * length, max_tokens, n, **more))
                except ContextLengthExceeded:
                    continue
            case ("step", token):
                if on.busy:
                    step(on, token)
            case ("end", index) if alive:
                victim = alive.pop(index % len(alive))
                if victim.phase is not Phase.ENDED:
                    on.end(victim)
        admit_all(on)
        assert on.blocks.reserved <= on.blocks.available
        assert on.blocks.reserved == sum(c.reserved for each in alive for c in each.choices)
        assert sum(len(chunk.tokens) for chunk in on.schedule().chunks) <= 6
        assert len(on.running) <= on._places <= 5
    for _ in range(400):
        admit_all(on)
        if on.busy:
            step(on)
    assert not on.waiting and not on.running
    assert on._places == on.blocks.reserved == on.blocks.used == 0
