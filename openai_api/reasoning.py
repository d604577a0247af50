"""What a model thinks aloud, told apart from its answer by tags in the text.

START ──<think>──► THINKING ──</think>──► ANSWER
  └──── other text: THINKING if the chat template has opened it, else ANSWER ────┘
"""

from __future__ import annotations

import dataclasses
import enum


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningForm:
    """`opened`: the chat template ends with the opening tag, so that an answer begins inside."""

    opened: bool
    begin: str = "<think>"
    end: str = "</think>"


FORMS = {"deepseek-r1": ReasoningForm(opened=True), "qwen3": ReasoningForm(opened=False)}
"""By the names of TensorRT-LLM's --reasoning_parser."""


class _Place(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    ANSWER = enum.auto()


class ReasoningSplitter:
    """Text in pieces, however cut, to (reasoning, answer) without the tags. Keeps back what may become a tag."""

    def __init__(self, form: ReasoningForm) -> None:
        self._form = form
        self._place = _Place.START
        self._held = ""

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THINKING or (self._place is _Place.START and self._form.opened)

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        if self._place is _Place.START:
            self._begin()
        reasoning = self._think() if self._place is _Place.THINKING else ""
        if self._place is not _Place.ANSWER:
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What was kept back, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self.thinking else ("", held)

    def _begin(self) -> None:
        begin, text = self._form.begin, self._held.lstrip()
        if text.startswith(begin):
            self._held = text.removeprefix(begin)
            self._place = _Place.THINKING
        elif not begin.startswith(text):
            self._place = _Place.THINKING if self._form.opened else _Place.ANSWER

    def _think(self) -> str:
        thought, tag, rest = self._held.partition(self._form.end)
        if tag:
            self._held = rest
            self._place = _Place.ANSWER
            return thought
        keep = next(
            (size for size in range(len(self._form.end) - 1, 0, -1) if thought.endswith(self._form.end[:size])), 0
        )
        self._held = thought[len(thought) - keep :]
        return thought[: len(thought) - keep]
