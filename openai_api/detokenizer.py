"""Token ids to text, one token at a time, never half a character.

Decoders look at neighbouring tokens (a character of three bytes may be three tokens; a leading space belongs to the
word before), so a window of tokens is decoded again and only what is new and complete is given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_WINDOW = 24
"""Tokens in the window above which it moves on; decoding is linear in it."""

_LIMIT = 1024
"""Tokens that may wait for the end of a character. Beyond this the output has no characters in it."""


class Decoder(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The deltas of `push` and `finish` join to the text of all tokens, whatever their grouping."""

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._boundary = 0  # tokens of the window at whose end the text last ended with a whole character
        self._given = 0  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        complete = text.rstrip(INCOMPLETE)
        if len(text) > len(complete):
            # What ends in replacement characters may still become a character, or be invalid for good.
            return self._flush(text) if len(self._window) > _LIMIT else self._give(complete)
        delta = self._give(text)
        if delta:
            self._move_on()
        return delta

    def finish(self) -> str:
        """What is left; invalid bytes at the very end show as replacement characters."""
        return self._flush(self._decode(self._window))

    def _give(self, text: str) -> str:
        delta = text[self._given :]
        self._given = max(self._given, len(text))
        return delta

    def _flush(self, text: str) -> str:
        delta = self._give(text)
        self._window, self._boundary, self._given = [], 0, 0
        return delta

    def _move_on(self) -> None:
        """Cuts the window at the previous whole character, so that the new one keeps its left neighbour."""
        if len(self._window) > _WINDOW and self._boundary:
            self._window = self._window[self._boundary :]
            self._given = len(self._decode(self._window))
        self._boundary = len(self._window)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(list(ids), skip_special_tokens=self._skip_special)
