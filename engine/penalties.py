"""What a sequence has said so far, as the penalties and bad words need it. Derived from its token ids alone, so that a
restart or a hand-off rebuilds it. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_ROOM = 64  # places for tokens that the prompt does not have


class TokenCounts:
    """The distinct tokens of one sequence, in order of first appearance, and how often each was generated.

    The prompt's tokens are listed with a count of 0: they weigh for repetition, not for presence and frequency.
    """

    __slots__ = ("_generated", "_ids", "_places")

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.empty(len(self._places) + _ROOM, np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._generated = np.zeros(len(self._ids), np.float32)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, token: int) -> None:
        """One more generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
        self._ids[place] = token
        self._generated[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """How often each of `ids` was generated."""
        return self._generated[: len(self._places)]


class BadWords:
    """Token sequences that must not appear in the answer: their last token is banned where the others just went by.
    What the prompt says does not count, as it does not for stop strings."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._single = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._longer = [tuple(word) for word in words if len(word) > 1]

    def banned(self, tokens: Sequence[int], prompt_tokens: int) -> tuple[int, ...]:
        """The next tokens that would complete a word after `tokens`, the first `prompt_tokens` of which are the
        prompt's."""
        found = self._single
        for word in self._longer:
            begin = len(tokens) - (len(word) - 1)
            if begin >= prompt_tokens and tuple(tokens[begin:]) == word[:-1]:
                found += (word[-1],)
        return found
