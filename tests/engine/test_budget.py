"""How one step's tokens are shared, without a scheduler around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import EQUAL_PROGRESS, FIRST_COME_FIRST_SERVED, Span, decode_limit, share

BLOCK = 4
SPANS = st.lists(st.builds(Span, st.integers(0, 40), st.integers(1, 60)), max_size=8)
POLICIES = st.sampled_from([None, FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS])


@given(POLICIES, st.integers(0, 40), SPANS)
def test_within_the_budget_aligned_and_never_idle(policy: str | None, budget: int, spans: list[Span]) -> None:
    taken = share(policy, budget, spans, BLOCK)
    assert sum(tokens for _, tokens in taken) <= budget
    assert len({index for index, _ in taken}) == len(taken)
    for index, tokens in taken:
        assert 0 < tokens <= spans[index].pending
        if tokens < spans[index].pending and budget >= BLOCK:
            assert (spans[index].computed + tokens) % BLOCK == 0
    if spans and budget:
        assert taken


def test_first_come_first_served_lets_the_first_take_all() -> None:
    spans = [Span(0, 100), Span(0, 4)]
    assert share(FIRST_COME_FIRST_SERVED, 32, spans, BLOCK) == [(0, 32)]


def test_a_short_prompt_passes_a_long_one_and_takes_a_quarter_at_most() -> None:
    assert share(None, 32, [Span(0, 100), Span(0, 60), Span(0, 4), Span(0, 5)], BLOCK) == [(2, 4), (0, 28)]
    assert share(None, 32, [Span(0, 20), Span(0, 4)], BLOCK) == [(0, 20), (1, 4)], "nothing waits: order is kept"


def test_equal_progress_gives_what_the_short_ones_leave_to_the_long_ones() -> None:
    assert share(EQUAL_PROGRESS, 32, [Span(0, 100), Span(0, 4), Span(0, 100)], BLOCK) == [(0, 12), (1, 4), (2, 16)]


def test_less_than_a_block_a_step_still_goes_on() -> None:
    assert share(None, 3, [Span(0, 10), Span(0, 10)], BLOCK) == [(0, 3)]
    assert share(None, 3, [Span(3, 7)], BLOCK) == [(0, 1)], "to the block's end first"


@pytest.mark.parametrize(("decodes", "prompts", "limit"), [(8, 0, 8), (8, 1, 6), (3, 1, 3), (8, 3, 6)])
def test_prompts_have_a_quarter_of_the_step(decodes: int, prompts: int, limit: int) -> None:
    assert decode_limit(8, decodes, prompts) == limit


def test_a_step_of_one_token_is_the_prompts() -> None:
    assert decode_limit(1, 1, 1) == 0 and decode_limit(1, 1, 0) == 1
