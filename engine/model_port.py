"""The model layer as the loop uses it, so that the loop can be tested without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.guided import GuideCompiler
from engine.sequence import ModelFacts
from engine.step import Chunk, Sampled, SampleSpec


class Runner(Protocol):
    def run(self, chunks: Sequence[Chunk]) -> Any:
        """Logits [rows, vocabulary] of the chunks that want them, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    facts: ModelFacts
    runner: Runner
    sample: Callable[[Any, Sequence[SampleSpec]], list[Sampled]]
    copy_block: Callable[[int, int], None]  # from, to
    guides: GuideCompiler | None = None  # None: no guided decoding
    gpu_memory: Callable[[], int] = lambda: 0  # bytes of device memory in use
