"""Draws tokens on the device without the host having to wait: the common cases of engine.sampler, the same draws.

Greedy rows, and rows with temperature, top_k, top_p and min_p, whose draw ends among the best tokens. What else a row
may ask for (bias, penalties, masks, log-probabilities) and the rare draw that goes deeper are left to engine.sampler,
which runs on the device too but reads results between its steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from engine import sampler
from engine.step import SampleSpec

RANKED = 1024
"""Best tokens that are ranked for a draw; a draw that is not settled among them is made again."""


def is_simple(spec: SampleSpec) -> bool:
    """Whether `draw` can do it."""
    return spec.shaping is None and not spec.banned and spec.logprobs is None and spec.forced is None


@dataclasses.dataclass(slots=True)
class Draws:
    """Results on the device, and their copies that are on the way to the host."""

    tokens: torch.Tensor  # [B] int64
    kept: torch.Tensor | None  # logits [B, vocab] that outlive the step's; None: all rows are greedy
    on_host: torch.Tensor  # [2, B] int64: tokens; 1 where the draw is settled, 0 where not, -1 where logits are bad
    ready: torch.cuda.Event

    def wait(self) -> tuple[list[int], list[int]]:
        """Tokens and states; waits for the draw alone, not for what was enqueued after it."""
        self.ready.synchronize()
        tokens, states = self.on_host.tolist()
        return tokens, states


def draw(
    logits: torch.Tensor, specs: Sequence[SampleSpec], greedy: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Draws:
    """Enqueues the draw of a token for each row of `logits` [B, vocab] (float32). All specs must be simple. `greedy`:
    the rows' best tokens and best logits, if they are there already."""
    if greedy is None:
        best, tokens = logits.max(-1)  # NaN counts as the greatest
    else:
        tokens, best = greedy
    states = torch.where(best.isfinite(), 1, -1)
    drawn = [row for row, spec in enumerate(specs) if spec.temperature != 0]
    kept = None
    if drawn:
        kept = logits.clone()
        rows = _on_device(np.asarray(drawn, dtype=np.int64), logits.device)
        chosen, settled = _draw(kept[rows], [specs[row] for row in drawn])
        tokens = tokens.index_copy(0, rows, chosen)
        states = states.index_copy(0, rows, states[rows].minimum(settled.to(states.dtype)))
    result = torch.stack((tokens, states.to(torch.int64)))
    on_host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    on_host.copy_(result, non_blocking=True)
    ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    ready.record()
    return Draws(result[0], kept, on_host, ready)


def _on_device(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B], and which are settled: engine.sampler's draws, those with cuts among the RANKED best."""
    vocab, device = logits.shape[1], logits.device
    columns = np.asarray(
        [
            (spec.temperature, spec.top_p, spec.min_p, sampler.uniform(spec.seed, spec.position), spec.top_k)
            for spec in specs
        ],
        dtype=np.float64,
    )
    temperature, top_p, min_p, number, asked = _on_device(columns.T.copy(), device)
    best = logits.amax(-1, keepdim=True)
    tokens = sampler._pick_uncut(logits, best, temperature, number)
    settled = torch.ones_like(tokens, dtype=torch.bool)
    cut = [row for row, spec in enumerate(specs) if spec.cuts]
    if not cut:
        return tokens, settled
    at = _on_device(np.asarray(cut, dtype=np.int64), device)
    logits, best, temperature, asked = logits[at], best[at], temperature[at, None], asked[at]
    top_k = torch.where((asked > 0) & (asked < vocab), asked, vocab).long()
    total = ((logits - best) / temperature.float().clamp(min=1e-30)).exp().sum(-1, dtype=torch.float64)
    ids, exact = sampler._best(logits, min(RANKED, vocab))
    weights = ((logits.gather(1, ids) - best).double() / temperature).exp()
    cuts = sampler._Cuts(top_k, top_p[at], min_p[at], number[at])
    chosen, enough = sampler._pick(ids, weights, vocab, total, cuts)
    return tokens.index_copy(0, at, chosen), settled.index_copy(0, at, enough & exact)
