"""What a mock engine is like: how long its steps take, what it answers, and what goes wrong with it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engine.step import Chunk


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step. A prompt of T tokens costs a·T² + b·T, each step with prompts `prefill_c` more; decodes cost
    what `decode` says at the share of the KV pool that their sequences hold. The defaults are of an 8B model on one
    large GPU."""

    prefill_a: float = 1.2e-10
    prefill_b: float = 2.0e-5
    prefill_c: float = 4.0e-3
    prefill: tuple[tuple[int, float], ...] = ()  # measured instead: (tokens of a prompt, seconds), from (0, 0) rising
    decode: tuple[tuple[float, float], ...] = (
        (0.0, 0.006),
        (1.0, 0.030),
    )  # (share, seconds), rising; linear between
    fetch_latency: float = 0.001
    fetch_bandwidth: float = 10e9  # bytes a second
    speed: float = 1.0  # all of it this many times faster

    def step(self, chunks: Sequence[Chunk], generating: Sequence[bool], pool_tokens: int) -> float:
        """`generating[i]`: whether chunk i is a decode."""
        seconds = 0.0
        held = 0
        prompts = False
        for chunk, decodes in zip(chunks, generating, strict=True):
            end = chunk.start + len(chunk.tokens)
            if decodes:
                held += end
            else:
                prompts = True
                seconds += self._prompt(end) - self._prompt(chunk.start)
        if prompts:
            seconds += self.prefill_c
        if held:
            seconds += self._decode(min(1.0, held / pool_tokens))
        return seconds / self.speed

    def fetch(self, size: int) -> float:
        """Seconds that reading `size` bytes from another worker takes."""
        return (self.fetch_latency + size / self.fetch_bandwidth) / self.speed

    def _prompt(self, tokens: int) -> float:
        if self.prefill:
            return _interpolated(self.prefill, tokens)
        return self.prefill_a * tokens * tokens + self.prefill_b * tokens

    def _decode(self, share: float) -> float:
        return _interpolated(self.decode, share)


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Beyond its ends, the line goes on as between the last two points; before the first one it is flat."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    index = min(bisect_right(points, (x, float("inf"))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_ids: list[int]
    answer_ids: list[int]  # EOS follows


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counted from the engine's start. A death is the end of the process as its clients see it."""

    die_at_token: int | None = None  # of all that it generates
    stall_steps: dict[int, float] = {}  # step number, from 1, to further seconds
    drop_events: list[int] = []  # numbers of cache events, from 1, that nobody is told of
    restart_after: float | None = None  # seconds from a death to the next start, with an empty cache and no faults


class MockProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    times: StepTimes = StepTimes()
    answers: list[Answer] = []  # other prompts are answered with tokens that follow from the prompt alone
    faults: Faults = Faults()
    block_bytes: int = 131_072 * 32  # of one KV block of 32 tokens, for the times of transfers


class Script:
    """Which token comes next: the same on every worker, for a prompt and its place in the answer."""

    def __init__(self, answers: Sequence[Answer], vocab_size: int, eos: int, first_id: int = 3) -> None:
        self._answers = {_digest(answer.prompt_ids): answer.answer_ids for answer in answers}
        self._vocab_size = vocab_size
        self._eos = eos
        self._first_id = first_id

    def digest(self, prompt_ids: Sequence[int]) -> bytes:
        return _digest(prompt_ids)

    def token(self, digest: bytes, position: int, stream: int, banned: Sequence[int] = ()) -> int:
        """`stream` is 0 for greedy choices, and the choice's seed for others."""
        answer = self._answers.get(digest)
        if answer is not None:
            token = answer[position] if position < len(answer) else self._eos
            if token not in banned:
                return token
        number = int.from_bytes(blake2b(digest + position.to_bytes(8) + stream.to_bytes(8), digest_size=8).digest())
        token = self._first_id + number % (self._vocab_size - self._first_id)
        while token in banned or token == self._eos:
            token = self._first_id + (token + 1 - self._first_id) % (self._vocab_size - self._first_id)
        return token


def _digest(prompt_ids: Sequence[int]) -> bytes:
    return blake2b(b"".join(token.to_bytes(4) for token in prompt_ids), digest_size=16).digest()
