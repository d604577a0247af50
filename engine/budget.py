"""How the tokens of one step are shared: between decodes and prompts, and among prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
EQUAL_PROGRESS = "EQUAL_PROGRESS"

PREFILL_SHARE = 4
"""At least 1/4 of a step is for prompts while there are any: so many decodes that they fill a step take turns."""

SHORT_SHARE = 4
"""At most 1/4 of a step is for short prompts that pass a long one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A prompt: `computed` tokens are there, `pending` more are to be computed."""

    computed: int
    pending: int


def decode_limit(budget: int, decodes: int, prompts: int) -> int:
    """How many decodes, of one token each, a step of `budget` tokens takes."""
    return min(decodes, budget - max(1, budget // PREFILL_SHARE) if prompts else budget)


def share(policy: str | None, budget: int, spans: Sequence[Span], block_size: int) -> list[tuple[int, int]]:
    """(index of the span, tokens) of those that get any; `spans` are in order of precedence.

    FIRST_COME_FIRST_SERVED: each in turn takes all it needs. EQUAL_PROGRESS: equal parts. None: in turn too, but
    prompts that fit into a quarter of the step need not wait for a long one to end. A chunk that does not complete its
    prompt ends at a block's end, unless the budget is smaller than that.
    """
    if policy == EQUAL_PROGRESS:
        taken = _equal(budget, spans, block_size)
    else:
        order = _short_ones_passed(budget, spans) if policy is None else list(range(len(spans)))
        taken = _in_turn(budget, order, spans, block_size)
    if spans and budget and not taken:
        taken = [(0, min(spans[0].pending, budget))]  # less than a block a step, but it goes on
    return taken


def _short_ones_passed(budget: int, spans: Sequence[Span]) -> list[int]:
    """Order in which short prompts, as many as fit into their share, stand before a first one that does not end in
    this step."""
    order = list(range(len(spans)))
    if len(spans) < 2 or spans[0].pending <= budget:
        return order
    left = budget // SHORT_SHARE
    passing = []
    for index in sorted(order[1:], key=lambda each: (spans[each].pending, each)):
        if spans[index].pending > left:
            break
        left -= spans[index].pending
        passing.append(index)
    return passing + [index for index in order if index not in passing]


def _in_turn(budget: int, order: Sequence[int], spans: Sequence[Span], block_size: int) -> list[tuple[int, int]]:
    taken: list[tuple[int, int]] = []
    for index in order:
        take = _aligned(spans[index], min(spans[index].pending, budget), block_size)
        if not take:
            break
        taken.append((index, take))
        budget -= take
    return taken


def _equal(budget: int, spans: Sequence[Span], block_size: int) -> list[tuple[int, int]]:
    """Smallest first, so that what a short prompt leaves is shared by the others."""
    taken: dict[int, int] = {}
    left = len(spans)
    for index in sorted(range(len(spans)), key=lambda each: (spans[each].pending, each)):
        part = -(-budget // left)
        take = _aligned(spans[index], min(spans[index].pending, part), block_size)
        if take:
            taken[index] = take
        budget -= take
        left -= 1
    rests = [_rest(span, taken.get(index, 0)) for index, span in enumerate(spans)]
    for index, more in _in_turn(budget, range(len(spans)), rests, block_size):  # what alignment has left over
        taken[index] = taken.get(index, 0) + more
    return sorted(taken.items())


def _rest(span: Span, taken: int) -> Span:
    return Span(span.computed + taken, span.pending - taken)


def _aligned(span: Span, take: int, block_size: int) -> int:
    if take == span.pending:
        return take
    return max(0, take - (span.computed + take) % block_size)
