"""Logits before the draw: bias, penalties, bans and grammar masks, for all rows of a batch together.

Each edit touches only its own row, element by element, so a row's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import SampleSpec, Shaping


def shaped(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """`logits` [len(specs), vocab] as they are to be drawn from: the same tensor where no row asks for anything, else a
    copy. The order is bias, repetition, presence and frequency, bans, grammar mask."""
    shapes = [(row, spec.shaping) for row, spec in enumerate(specs) if spec.shaping is not None]
    bans = [(row, token) for row, spec in enumerate(specs) for token in spec.banned if 0 <= token < logits.shape[1]]
    if not shapes and not bans:
        return logits
    result = logits.clone()
    _add_bias(result, shapes)
    _penalise(result, shapes)
    if bans:
        rows, tokens = zip(*bans, strict=True)
        result[_at(result, rows), _at(result, tokens)] = -torch.inf
    _apply_masks(result, shapes)
    return result


_Shapes = Sequence[tuple[int, Shaping]]


def _at(like: torch.Tensor, indexes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(indexes, dtype=torch.int64, device=like.device)


def _add_bias(logits: torch.Tensor, shapes: _Shapes) -> None:
    biased = [(row, shaping.bias) for row, shaping in shapes if shaping.bias is not None]
    if not biased:
        return
    rows = np.repeat([row for row, _ in biased], [len(ids) for _, (ids, _) in biased])
    ids = np.concatenate([ids for _, (ids, _) in biased])
    values = np.concatenate([values for _, (_, values) in biased])
    place = (_tensor(logits, rows), _tensor(logits, ids))
    logits[place] = logits[place] + _tensor(logits, values)


def _penalise(logits: torch.Tensor, shapes: _Shapes) -> None:
    asked = [(row, shaping, shaping.counts) for row, shaping in shapes if shaping.counts]
    if not asked:
        return
    lengths = [len(counts) for _, _, counts in asked]
    rows = np.repeat([row for row, _, _ in asked], lengths)
    place = (_tensor(logits, rows), _tensor(logits, np.concatenate([counts.ids for _, _, counts in asked])))
    generated = _tensor(logits, np.concatenate([counts.generated for _, _, counts in asked]))
    repetition, presence, frequency = (
        _tensor(logits, np.repeat(np.array(values, np.float32), lengths))
        for values in zip(*((each.repetition, each.presence, each.frequency) for _, each, _ in asked), strict=True)
    )
    values = logits[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[place] = values - presence * (generated > 0) - frequency * generated


def _apply_masks(logits: torch.Tensor, shapes: _Shapes) -> None:
    masked = [(row, shaping.mask) for row, shaping in shapes if shaping.mask is not None]
    if not masked:
        return
    words = _tensor(logits, np.stack([mask for _, mask in masked]))
    refused = ~_bits(words, logits.shape[1])
    if len(masked) == len(logits):
        logits.masked_fill_(refused, -torch.inf)
        return
    rows = _at(logits, [row for row, _ in masked])
    logits[rows] = logits[rows].masked_fill(refused, -torch.inf)


def _bits(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """[B, W] int32 to [B, vocab] bool; tokens beyond the words are not in the set."""
    powers = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = ((words[:, :, None] >> powers) & 1).bool().flatten(1)[:, :vocab]
    if bits.shape[1] == vocab:
        return bits
    return torch.nn.functional.pad(bits, (0, vocab - bits.shape[1]))


def _tensor(like: torch.Tensor, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
