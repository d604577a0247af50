"""What the scheduler hands to the model runner for one step, and what the sampler needs and gives. No torch here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence: a decode step is a chunk of one token, a prefill chunk has several.

    `start` tokens of the sequence are already in the pool; `block_table` covers start + len(tokens) positions.
    """

    tokens: list[int]
    start: int
    block_table: list[int]
    wants_logits: bool  # of its last token


@dataclasses.dataclass(slots=True)
class SampleSpec:
    """How to draw one token. The draw is a pure function of (logits, this): the uniform number comes from (seed,
    position) alone, so batching, restarts and the hand-off cannot change it."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    position: int = 0  # tokens this choice has generated before
    banned: tuple[int, ...] = ()  # never drawn (EOS and stop ids below min_tokens)
    logprobs: int | None = None


@dataclasses.dataclass(slots=True)
class Sampled:
    token: int
    logprob: float | None = None  # of the raw distribution (log-softmax of the logits, before temperature and cuts)
    top: list[tuple[int, float]] | None = None
