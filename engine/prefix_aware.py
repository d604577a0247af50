"""Prompts that begin alike and come together: the first one computes the beginning, the others wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.sequence import Choice

_MIN_BLOCKS = 4
_STEP_SHARE = 8


def worth_waiting(max_num_tokens: int, block_size: int) -> int:
    """Blocks that are computed a second time rather than waited for: 1/8 of a step, but at least 4."""
    return max(_MIN_BLOCKS, max_num_tokens // _STEP_SHARE // block_size)


def is_being_computed(keys: Sequence[bytes], first: int, worth: int, running: Iterable[Choice]) -> bool:
    """Whether a running prompt will have `worth` or more blocks of a prompt with `keys`, from block `first` on."""
    last = first + worth - 1
    if last >= len(keys):
        return False
    for choice in running:
        others = choice.request.prompt_keys
        if not choice.generated and len(choice.keys) <= first and last < len(others) and others[last] == keys[last]:
            return True
    return False
