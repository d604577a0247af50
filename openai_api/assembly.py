"""Text of one choice from its tokens: detokenising, stop strings, finish reason, counts.

    running ──EOS, stop id, stop string──► finished "stop"
       └─────max_tokens (said by the engine)──► finished "length"

One token at a time, so that neither the grouping of tokens into outputs nor the worker that runs this changes the
answer: a context worker runs it on the first token, a generation worker from the replayed first token on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from engine.messages import Output, TokenLogprob
from openai_api.detokenizer import Decoder, Detokenizer
from openai_api.reasoning import ReasoningForm, ReasoningSplitter


@dataclasses.dataclass(frozen=True, slots=True)
class TextRules:
    stops: Sequence[str] = ()
    include_stop: bool = False  # the stop string, or the token of stop_token_ids, is part of the text
    min_tokens: int = 0  # stop strings that are complete before this many tokens do not count
    skip_special_tokens: bool = True
    eos_token_ids: Collection[int] = ()
    reasoning: ReasoningForm | None = None  # how it is told from the answer, if it is
    discard: bool = False  # no token was asked for: what the engine generates does not show


@dataclasses.dataclass(slots=True)
class TokenEntry:
    """One token for the log-probability lists; `offset` is the length of the text before it, in characters. The first
    token of a prompt is not `scored`: nothing predicts it."""

    logprob: TokenLogprob
    offset: int
    scored: bool = True


@dataclasses.dataclass(slots=True)
class Delta:
    """What one engine output adds to a choice. `finish_reason` is None while the choice goes on."""

    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""  # beside `text`


class StopScanner:
    """Finds the first stop string in text that arrives in pieces; keeps back what may become one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that no stop string can reach any more, the stop string found or None)."""
        pending = self._held + text
        found = self._earliest(pending)
        if found is not None:
            at, stop = found
            self._held = ""
            return pending[: at + len(stop)] if self._include else pending[:at], stop
        keep = self._tail_length(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """The match that ends first, as if text came by the character; of two that end together the longer."""
        found = [(text.find(stop), stop) for stop in self._stops]
        hits = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        _, at, stop = min(hits)
        return at, stop

    def _tail_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ChoiceText:
    """Assembles one choice. After `finish_reason` is set, further tokens are not looked at."""

    def __init__(self, decoder: Decoder, rules: TextRules) -> None:
        self._rules = rules
        self._detokenizer = Detokenizer(decoder, rules.skip_special_tokens)
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._decoded = 0  # characters of all text so far, held back or not
        self.token_count = 0  # generated tokens, with the one that ended the choice
        self.reasoning_count = 0  # of these, the tokens of reasoning and of the tag that ends it
        self._splitter = ReasoningSplitter(rules.reasoning) if rules.reasoning else None
        # Of all text at once, whatever the scanner keeps back: it says where a token belongs.
        self._tracker = ReasoningSplitter(rules.reasoning) if rules.reasoning else None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, output: Output) -> Delta:
        """The tokens of one engine output, up to the one that ends the choice."""
        if self._rules.discard:
            self.finish_reason = "length"
            return Delta("", [], [], "length")
        delta = Delta("", [], [])
        last = len(output.token_ids) - 1
        for place, token in enumerate(output.token_ids):
            if self.finished:
                break
            self.token_count += 1
            thinking = self._tracker is not None and self._tracker.thinking
            delta.token_ids.append(token)
            if output.logprobs is not None:
                delta.entries.append(TokenEntry(output.logprobs[place], self._decoded))
            ending = output.finish_reason if place == last else None
            if ending == "stop" and self._is_stop_token(token, output):
                delta.text += self._end_at_stop_token(token, output)
            else:
                delta.text += self._text_of(token)
            self.reasoning_count += thinking or (self._tracker is not None and self._tracker.thinking)
        if output.finish_reason not in (None, "not_finished") and not self.finished:
            delta.text += self._end(str(output.finish_reason))
        delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        if self._splitter is not None:
            delta.reasoning, delta.text = self._split(self._splitter, delta.text)
        return delta

    def _split(self, splitter: ReasoningSplitter, text: str) -> tuple[str, str]:
        reasoning, answer = splitter.push(text)
        if self.finished:
            last = splitter.finish()
            reasoning, answer = reasoning + last[0], answer + last[1]
        return reasoning, answer

    def _is_stop_token(self, token: int, output: Output) -> bool:
        """Not so for the replayed token of a choice that a stop string ended: its text still counts."""
        return output.stop_reason is not None or token in self._rules.eos_token_ids

    def _end_at_stop_token(self, token: int, output: Output) -> str:
        shown = self._rules.include_stop and output.stop_reason is not None
        text = self._text_of(token) if shown else ""
        if not self.finished:
            text += self._end("stop", output.stop_reason)
        return text

    def _text_of(self, token: int) -> str:
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        if self._tracker is not None:
            self._tracker.push(text)
        return self._scan(text)

    def _scan(self, text: str) -> str:
        if not self._rules.stops:
            return text
        if self.token_count < self._rules.min_tokens:
            return text
        shown, stop = self._scanner.push(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return shown

    def _end(self, reason: str, stop_reason: int | None = None) -> str:
        """Gives out what was held back; bytes that never became a character count as text, and may end in a stop."""
        text = self._scan(self._detokenizer.finish())
        if not self.finished:
            self.finish_reason, self.stop_reason = reason, stop_reason
            text += self._scanner.release()
        return text
