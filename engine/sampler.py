"""Draws the next token of each row of logits.

A draw is a pure function of (logits, SampleSpec): the random number is a hash of (seed, position), so neither batching
nor a restart nor a hand-off to another worker changes it, and no generator state has to travel.

    bias -> repetition, presence and frequency penalties -> banned tokens out -> grammar mask (engine.logits)
    -> divide by temperature -> the top_k best -> of those, the fewest best that hold top_p of the probability -> of
    those, the ones at least min_p times as likely as the best
    -> the first token, best first, at which the cumulative probability exceeds u * (kept probability)

Where nothing is cut (top_k, top_p and min_p off) the tokens stand in the order of their ids instead: no ranking.

Equal logits rank by token id, lowest first. Temperature 0 takes the best token whatever top_k and top_p say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from engine.logits import shaped
from engine.step import BadLogits, Sampled, SampleSpec

_RANKED = (128, 4096)  # best tokens that are ranked, in turn, before all are; nearly every draw ends among the first
_TOGETHER = 1 << 18  # logits worked on at once by a CPU: more fall out of the cache, and each buffer costs page faults
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


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
    together = len(specs) if logits.device.type != "cpu" else max(1, _TOGETHER // logits.shape[1])
    results: list[Sampled] = []
    bad: list[int] = []
    for first in range(0, len(specs), together):
        try:
            results += _sample(logits[first : first + together], specs[first : first + together])
        except BadLogits as error:
            bad += [first + row for row in error.rows]
    if bad:
        raise BadLogits(bad)
    return results


def _sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    allowed = shaped(logits, specs)
    finite = allowed.amax(-1).isfinite()
    if not bool(finite.all()):
        raise BadLogits((~finite).nonzero().flatten().tolist())
    tokens = [spec.forced or 0 for spec in specs]
    greedy = [row for row, spec in enumerate(specs) if spec.forced is None and spec.temperature == 0]
    drawn = [row for row, spec in enumerate(specs) if spec.forced is None and spec.temperature != 0]
    uncut = [row for row in drawn if not specs[row].cuts]
    drawn = [row for row in drawn if specs[row].cuts]
    if greedy:
        for row, token in zip(greedy, _rows(allowed, greedy).argmax(-1).tolist(), strict=True):
            tokens[row] = token
    if uncut:
        for row, token in zip(uncut, _draw_uncut(_rows(allowed, uncut), [specs[row] for row in uncut]), strict=True):
            tokens[row] = token
    if drawn:
        for row, token in zip(drawn, _draw(_rows(allowed, drawn), [specs[row] for row in drawn]), strict=True):
            tokens[row] = token
    return _with_logprobs(logits, allowed, specs, tokens)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


@dataclasses.dataclass(slots=True)
class _Cuts:
    """Of each row [B]; all float64 but top_k."""

    top_k: torch.Tensor  # the size of the vocabulary if all tokens stay
    top_p: torch.Tensor
    min_p: torch.Tensor
    number: torch.Tensor  # the uniform one

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> _Cuts:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        top_k = [spec.top_k if 0 < spec.top_k < vocab else vocab for spec in specs]
        return cls(
            torch.tensor(top_k, device=device),
            column([spec.top_p for spec in specs]),
            column([spec.min_p for spec in specs]),
            column([uniform(spec.seed, spec.position) for spec in specs]),
        )

    def at(self, rows: torch.Tensor) -> _Cuts:
        return _Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.number[rows])


def _draw_uncut(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    columns = [(spec.temperature, uniform(spec.seed, spec.position)) for spec in specs]
    temperature, number = torch.tensor(columns, dtype=torch.float64, device=logits.device).T
    tokens = _pick_uncut(logits, logits.amax(-1, keepdim=True), temperature, number)
    return [int(token) for token in tokens.tolist()]


def _pick_uncut(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """Draws among all tokens in the order of their ids. `best` [B, 1] logits, `temperature` and `number` [B] float64;
    [B] tokens. Waits for nothing on a device."""
    weights = ((logits - best) / temperature[:, None].float().clamp(min=1e-30)).exp()
    below = weights.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(below, number[:, None] * below[:, -1:], right=True)
    return found[:, 0].clamp(max=logits.shape[1] - 1)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    vocab, device = logits.shape[1], logits.device
    temperature = torch.tensor([spec.temperature for spec in specs], dtype=torch.float64, device=device)[:, None]
    best = logits.amax(-1, keepdim=True)
    # Relative to the best logit nothing overflows at any temperature; the rest underflows to probability 0.
    # In float32, since float64 over the whole vocabulary takes ten times as long: the sum is good to 1e-7.
    total = ((logits - best) / temperature.float().clamp(min=1e-30)).exp().sum(-1, dtype=torch.float64)
    cuts = _Cuts.of(specs, vocab, device)
    tokens = torch.zeros(len(specs), dtype=torch.int64, device=device)
    open_rows = torch.arange(len(specs), device=device)
    for count in (*_RANKED, vocab):
        at = open_rows
        ids, exact = _best(logits[at], count)
        weights = ((logits[at].gather(1, ids) - best[at]).double() / temperature[at]).exp()
        tokens[at], settled = _pick(ids, weights, vocab, total[at], cuts.at(at))
        open_rows = at[~(settled & exact)]
        if not len(open_rows):
            break
    return [int(token) for token in tokens.tolist()]


def _pick(
    ids: torch.Tensor, weights: torch.Tensor, vocab: int, total: torch.Tensor, cuts: _Cuts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the best tokens `ids` [B, n] of unnormalised probability `weights`, that of the best being 1; `total`
    is that of the whole vocabulary. Gives the tokens, and for which rows no token beyond the n could matter."""
    count = ids.shape[1]
    below = weights.cumsum(-1)
    cut = cuts.top_k.clamp(max=count)[:, None] - 1
    listed = cuts.top_k <= count  # all that top_k keeps is among the n
    whole = cuts.top_k >= vocab  # top_k cuts nothing, so that `total` is what top_p is a share of
    mass = torch.where(listed, below.gather(1, cut)[:, 0], total)
    reached = below >= (cuts.top_p * mass)[:, None]
    kept = torch.where(reached.any(-1), reached.int().argmax(-1), count - 1).minimum(cut[:, 0])
    likely = weights >= cuts.min_p[:, None]
    kept = kept.minimum(likely.sum(-1) - 1).clamp(min=0)
    ends = (reached.any(-1) & (cuts.top_p < 1)) | ~likely[:, -1]  # the last that stays is among the n
    limit_known = listed | (whole & ends)
    limit = cuts.number * torch.where(limit_known, below.gather(1, kept[:, None])[:, 0], mass)
    crossed = below > limit[:, None]
    chosen = torch.where(crossed.any(-1), crossed.int().argmax(-1), count - 1).minimum(kept)
    uncut = whole & (cuts.top_p >= 1) & (cuts.min_p <= 0)
    settled = limit_known | (uncut & crossed.any(-1))
    return ids.gather(1, chosen[:, None])[:, 0], settled | (count == vocab)


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, min(count, vocab)] of the best logits, best first, equal ones by id; and which rows are exact.

    A row is not exact when logits equal to its worst listed one were left out.
    """
    vocab = logits.shape[1]
    if count >= vocab:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(-1)
    ranked = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, ranked), (logits >= values[:, -1:]).sum(-1) == count


def _with_logprobs(
    raw: torch.Tensor, processed: torch.Tensor, specs: Sequence[SampleSpec], tokens: list[int]
) -> list[Sampled]:
    results = [Sampled(token) for token in tokens]
    for logits, of_processed in ((raw, False), (processed, True)):
        asked = [
            row
            for row, spec in enumerate(specs)
            if spec.logprobs is not None and spec.processed_logprobs == of_processed
        ]
        if asked:
            _add_logprobs(results, _rows(logits, asked), asked, specs)
    return results


def _add_logprobs(results: list[Sampled], logits: torch.Tensor, asked: list[int], specs: Sequence[SampleSpec]) -> None:
    """`logits` [len(asked), vocab] are the rows `asked` of the batch."""
    chosen = torch.tensor([results[row].token for row in asked], device=logits.device)
    logprobs = logits.log_softmax(-1)
    of_chosen = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    tops = _tops(logits, logprobs, [specs[row].logprobs or 0 for row in asked])
    for row, value, top in zip(asked, of_chosen, tops, strict=True):
        results[row].logprob = value
        results[row].top = top


def _tops(logits: torch.Tensor, logprobs: torch.Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The best tokens of each row, as many as `counts` asks for, ranked together."""
    most = max(counts)
    if most < 1:
        return [[] for _ in counts]
    ids, exact = _best(logits, most)
    for row in (~exact).nonzero().flatten().tolist():
        ids[row] = _best(logits[row : row + 1], logits.shape[1])[0][0, : ids.shape[1]]
    values = logprobs.gather(1, ids).tolist()
    return [
        list(zip(own[:count], value[:count], strict=True))
        for own, value, count in zip(ids.tolist(), values, counts, strict=True)
    ]
