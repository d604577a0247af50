"""From one step's logits to tokens by choice, and to the log-probabilities of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from engine.batch import Batch
from engine.sequence import Choice, Request, logprobs_of
from engine.step import BadLogits, Sampled, SampleSpec

Sample = Callable[[Any, Sequence[SampleSpec]], list[Sampled]]


@dataclasses.dataclass(slots=True)
class Drawn:
    """`first` tokens of requests whose prompts are complete, one a choice; `next` tokens of choices that go on.
    `failed` requests have rows that define no distribution; nothing was drawn for any of their choices."""

    first: list[tuple[Request, list[Sampled]]] = dataclasses.field(default_factory=list)
    next: list[tuple[Choice, Sampled]] = dataclasses.field(default_factory=list)
    failed: list[Request] = dataclasses.field(default_factory=list)


def draw(sample: Sample, logits: Any, batch: Batch) -> Drawn:
    """Everything that the batch asks for. Prompts' log-probabilities are added to their requests."""
    drawn = Drawn()
    choices, rows, specs = batch.draws()
    if len(rows) > 1 and rows[-1] != len(rows) - 1:
        logits = logits[rows]
    first: dict[str, tuple[Request, list[Sampled]]] = {}
    for choice, spec, sampled in _sampled(sample, logits, choices, specs, drawn.failed):
        if spec.forced is not None:
            choice.request.prompt_logprobs += logprobs_of(sampled) or []
        elif choice.generated:
            drawn.next.append((choice, sampled))
        else:
            first.setdefault(choice.request.id, (choice.request, []))[1].append(sampled)
    drawn.first = list(first.values())
    return drawn


def _sampled(
    sample: Sample, logits: Any, choices: list[Choice], specs: list[SampleSpec], failed: list[Request]
) -> list[tuple[Choice, SampleSpec, Sampled]]:
    """Draws again without the requests that cannot be drawn for, until all others are."""
    while specs:
        try:
            return list(zip(choices, specs, sample(logits, specs), strict=True))
        except BadLogits as error:
            failed += dict.fromkeys(choices[row].request for row in error.rows)
            keep = [row for row, choice in enumerate(choices) if choice.request not in failed]
            logits = logits[keep]
            choices, specs = [choices[row] for row in keep], [specs[row] for row in keep]
    return []
