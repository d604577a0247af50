"""What one step of the engine computes, and for whom."""

from __future__ import annotations

import dataclasses

from engine.sequence import Choice
from engine.step import Chunk, SampleSpec


@dataclasses.dataclass(slots=True)
class Batch:
    """One step's work; `choices[i]` owns `chunks[i]`."""

    choices: list[Choice] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)

    def draws(self) -> tuple[list[Choice], list[int], list[SampleSpec]]:
        """The tokens to draw: for which choice, from which row of the logits, and how. A prompt that is complete draws
        the first tokens of all choices of its request from one row. Tokens of a prompt to be scored stand among them,
        with a spec that has them `forced`."""
        choices: list[Choice] = []
        rows: list[int] = []
        specs: list[SampleSpec] = []
        row = 0
        for choice, chunk in zip(self.choices, self.chunks, strict=True):
            if chunk.wants_all:
                scored = choice.prompt_specs(chunk)
                choices += [choice] * len(scored)
                rows += range(row, row + len(scored))
                specs += scored
            row += chunk.logit_rows
            if chunk.wants_logits:
                drawn = [choice] if choice.generated else choice.request.open_choices()
                choices += drawn
                rows += [row - 1] * len(drawn)
                specs += [each.spec() for each in drawn]
        return choices, rows, specs
