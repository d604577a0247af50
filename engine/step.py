"""What the scheduler hands to the model runner for one step, and what the sampler needs and gives. No torch here."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.penalties import TokenCounts

Words: TypeAlias = NDArray[np.int32]
"""A set of tokens: bit i % 32 of word i // 32 tells whether token i is in it."""


@dataclasses.dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence: a decode step is a chunk of one token, a prefill chunk has several.

    `start` tokens of the sequence are already in the pool; `block_table` covers start + len(tokens) positions.
    """

    tokens: list[int]
    start: int
    block_table: list[int]
    wants_logits: bool  # of its last token
    wants_all: bool = False  # logits of all its tokens: the prompt's log-probabilities were asked for

    @property
    def logit_rows(self) -> int:
        """How many rows of logits this chunk gives: those of its last tokens."""
        return len(self.tokens) if self.wants_all else int(self.wants_logits)


@dataclasses.dataclass(slots=True)
class Shaping:
    """What one choice does to its logits before a draw; most choices have none. The parts are applied in this order."""

    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None  # token ids, what is added to each
    counts: TokenCounts | None = None  # None: no penalties
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    mask: Words | None = None  # the tokens that a grammar allows


@dataclasses.dataclass(slots=True)
class SampleSpec:
    """How to draw one token. The draw is a pure function of (logits, this): the uniform number comes from (seed,
    position) alone, so batching, restarts and the hand-off cannot change it."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    position: int = 0  # tokens this choice has generated before
    banned: tuple[int, ...] = ()  # never drawn (EOS and stop ids below min_tokens, bad words)
    logprobs: int | None = None
    min_p: float = 0.0  # tokens less likely than this share of the best one's probability are not drawn
    shaping: Shaping | None = None
    processed_logprobs: bool = False  # of the logits after bias, penalties, bans and grammar; before temperature
    forced: int | None = None  # nothing is drawn: this is the token, a prompt's, and its log-probabilities are wanted

    @property
    def cuts(self) -> bool:
        """Some tokens are not drawn for being too unlikely."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(slots=True)
class Sampled:
    token: int
    logprob: float | None = None  # of the raw distribution (log-softmax of the logits, before temperature and cuts)
    top: list[tuple[int, float]] | None = None


class BadLogits(ValueError):
    """`rows` have NaN or no finite best token: nothing can be drawn from them. The other rows are sound."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(f"logits: no finite best token in rows {rows}")
