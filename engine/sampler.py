"""Draws the next token of each row of logits.

A draw is a pure function of (logits, SampleSpec): the random number is a hash of (seed, position), so neither batching
nor a restart nor a hand-off to another worker changes it, and no generator state has to travel.

    banned tokens out -> divide by temperature -> the top_k best -> of those, the fewest best that hold top_p of the
    probability -> the first token, best first, at which the cumulative probability exceeds u * (kept probability)

Equal logits rank by token id, lowest first. Temperature 0 takes the best token whatever top_k and top_p say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.step import Sampled, SampleSpec

_RANKED = (128, 4096)  # best tokens that are ranked, in turn, before all are; nearly every draw ends among the first
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


class BadLogits(ValueError):
    """`rows` have NaN or no finite best token: nothing can be drawn from them. The other rows are sound."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(f"logits: no finite best token in rows {rows}")


def _mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64 bits in which every input bit moves every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: output number `position` of splitmix64 started at a hash of `seed`.

    The hash keeps neighbouring seeds (the choices of one request) from giving shifted copies of one sequence.
    """
    start = _mix((seed + _GOLDEN) & _MASK64)
    return (_mix((start + (position + 1) * _GOLDEN) & _MASK64) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One token a row of `logits` [len(specs), vocab] (float32, left unchanged).

    BadLogits if a row defines no distribution: a quiet guess would look like an answer.
    """
    if logits.shape[0] != len(specs):
        raise ValueError(f"logits: {logits.shape[0]} rows for {len(specs)} specs")
    if not specs:
        return []
    allowed = _without_banned(logits, specs)
    finite = allowed.amax(-1).isfinite()
    if not bool(finite.all()):
        raise BadLogits((~finite).nonzero().flatten().tolist())
    tokens = [0] * len(specs)
    greedy = [row for row, spec in enumerate(specs) if spec.temperature == 0]
    drawn = [row for row, spec in enumerate(specs) if spec.temperature != 0]
    for row, token in zip(greedy, _rows(allowed, greedy).argmax(-1).tolist(), strict=True):
        tokens[row] = token
    if drawn:
        for row, token in zip(drawn, _draw(_rows(allowed, drawn), [specs[row] for row in drawn]), strict=True):
            tokens[row] = token
    return _with_logprobs(logits, specs, tokens)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _without_banned(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    pairs = [(row, token) for row, spec in enumerate(specs) for token in spec.banned if 0 <= token < logits.shape[1]]
    if not pairs:
        return logits
    rows, tokens = zip(*pairs, strict=True)
    return logits.index_put((torch.tensor(rows), torch.tensor(tokens)), torch.tensor(-torch.inf, dtype=logits.dtype))


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    vocab = logits.shape[1]
    temperature = torch.tensor([spec.temperature for spec in specs], dtype=torch.float64)[:, None]
    best = logits.amax(-1, keepdim=True)
    # Relative to the best logit nothing overflows at any temperature; the rest underflows to probability 0.
    # In float32, since float64 over the whole vocabulary takes ten times as long: the sum is good to 1e-7.
    total = ((logits - best) / temperature.float().clamp(min=1e-30)).exp().sum(-1, dtype=torch.float64)
    top_k = torch.tensor([spec.top_k if 0 < spec.top_k < vocab else vocab for spec in specs])
    top_p = torch.tensor([spec.top_p for spec in specs], dtype=torch.float64)
    number = torch.tensor([uniform(spec.seed, spec.position) for spec in specs], dtype=torch.float64)
    tokens = torch.zeros(len(specs), dtype=torch.int64)
    open_rows = torch.arange(len(specs))
    for count in (*_RANKED, vocab):
        at = open_rows
        ids, exact = _best(logits[at], count)
        weights = ((logits[at].gather(1, ids) - best[at]).double() / temperature[at]).exp()
        tokens[at], settled = _pick(ids, weights, vocab, total[at], top_k[at], top_p[at], number[at])
        open_rows = at[~(settled & exact)]
        if not len(open_rows):
            break
    return [int(token) for token in tokens.tolist()]


def _pick(
    ids: torch.Tensor,
    weights: torch.Tensor,
    vocab: int,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    number: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the best tokens `ids` [B, n] of unnormalised probability `weights`; `total` is that of the whole
    vocabulary. Gives the tokens, and for which rows no token beyond the n could matter."""
    count = ids.shape[1]
    below = weights.cumsum(-1)
    cut = top_k.clamp(max=count)[:, None] - 1
    listed = top_k <= count  # all that top_k keeps is among the n
    mass = torch.where(listed, below.gather(1, cut)[:, 0], total)
    reached = below >= (top_p * mass)[:, None]
    kept = torch.where(reached.any(-1), reached.int().argmax(-1), count - 1).minimum(cut[:, 0])
    limit_known = listed | (reached.any(-1) & (top_p < 1))
    limit = number * torch.where(limit_known, below.gather(1, kept[:, None])[:, 0], mass)
    crossed = below > limit[:, None]
    chosen = torch.where(crossed.any(-1), crossed.int().argmax(-1), count - 1).minimum(kept)
    settled = limit_known | ((top_p >= 1) & crossed.any(-1))
    return ids.gather(1, chosen[:, None])[:, 0], settled | (count == vocab)


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, min(count, vocab)] of the best logits, best first, equal ones by id; and which rows are exact.

    A row is not exact when logits equal to its worst listed one were left out.
    """
    vocab = logits.shape[1]
    if count >= vocab:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.ones(len(logits), dtype=torch.bool)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(-1)
    ranked = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, ranked), (logits >= values[:, -1:]).sum(-1) == count


def _with_logprobs(logits: torch.Tensor, specs: Sequence[SampleSpec], tokens: list[int]) -> list[Sampled]:
    results = [Sampled(token) for token in tokens]
    asked = [row for row, spec in enumerate(specs) if spec.logprobs is not None]
    if not asked:
        return results
    chosen = torch.tensor([tokens[row] for row in asked])
    logprobs = _rows(logits, asked).log_softmax(-1)
    of_chosen = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    for index, row in enumerate(asked):
        results[row].logprob = of_chosen[index]
        results[row].top = _top(logits[row], logprobs[index], specs[row].logprobs or 0)
    return results


def _top(logits: torch.Tensor, logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    if count < 1:
        return []
    ids, exact = _best(logits[None], count)
    if not exact[0]:
        ids = _best(logits[None], logits.shape[0])[0][:, :count]
    best = ids[0]
    return list(zip(best.tolist(), logprobs[best].tolist(), strict=True))
