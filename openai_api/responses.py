"""Response bodies and stream chunks in OpenAI's shapes, with TensorRT-LLM's extra fields, as JSON bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import TokenLogprob
from openai_api.assembly import Delta, TokenEntry
from openai_api.intake import Job
from openai_api.logprobs import chat_logprobs, completion_logprobs, echoed, prompt_logprobs
from openai_api.schemas import CompletionRequest
from openai_api.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(slots=True)
class Usage:
    """`cached_tokens` of the prompt were not computed for this request. The prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # of the generated ones; None where reasoning is not told apart

    def json(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


@dataclasses.dataclass(slots=True)
class ChoiceResult:
    """The deltas of one choice, added up."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    entries: list[TokenEntry] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    disaggregated_params: dict[str, Any] | None = None
    reasoning: str = ""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def best_of(choices: Sequence[ChoiceResult], count: int) -> list[ChoiceResult]:
    """The `count` of the highest sum of log-probabilities, best first, numbered anew. All, if there are no more."""
    if count >= len(choices):
        return list(choices)
    ranked = sorted(choices, key=lambda choice: -sum(entry.logprob.logprob for entry in choice.entries))
    return [dataclasses.replace(choice, index=index) for index, choice in enumerate(ranked[:count])]


class ResponseWriter:
    """Writes the answer to one job. Chunks of one stream share id, created, model and object.

    `prompt_logprobs` are to be set before the first chunk or the body, if the job asked for them.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, first_index: int = 0) -> None:
        """`first_index` is that of the job's first choice in the answer."""
        self._job = job
        self._first_index = first_index
        self._tokenizer = tokenizer
        self._with_ids = bool(job.request.return_token_ids) or not job.chat
        self._with_logprobs = job.logprobs
        self.prompt_logprobs: Sequence[TokenLogprob] | None = None
        self._echo: tuple[str, list[TokenEntry]] | None = None
        options = job.request.stream_options
        self.wants_usage = options is not None and options.include_usage
        self._usage_in_chunks = options is not None and options.continuous_usage_stats
        self._opened: set[int] = set()
        self._pending: dict[int, Delta] = {}  # tokens whose text is being held back

    # ------------------------------------------------------------ whole

    def body(self, choices: Sequence[ChoiceResult], usage: Usage, **extra: Any) -> bytes:
        """`extra` are fields of the response object. Choices are in index order."""
        return self.document(self.choices(choices), usage, **extra)

    def choices(self, choices: Sequence[ChoiceResult]) -> list[dict[str, Any]]:
        return [self._choice(choice) for choice in choices]

    def document(self, choices: Sequence[dict[str, Any]], usage: Usage, **extra: Any) -> bytes:
        name = "chat.completion" if self._job.chat else "text_completion"
        document = self._head(name) | {"choices": choices, "usage": usage.json()}
        if self._job.chat and self._job.request.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self.prompt_logprobs or ())
        if self._job.request.return_token_ids:
            document["prompt_token_ids"] = self._job.prompt_ids
        return _encode(document | extra)

    def _choice(self, choice: ChoiceResult) -> dict[str, Any]:
        content: dict[str, Any] = {"index": self._first_index + choice.index}
        entries: Sequence[TokenEntry] = choice.entries
        if self._job.chat:
            reasoning = {"reasoning_content": choice.reasoning} if self._job.text.reasoning else {}
            content["message"] = {"role": "assistant", "content": choice.text} | reasoning
        else:
            before, entries = self._echoed(entries, begins=True)
            content["text"] = before + choice.text
            if self._job.request.prompt_logprobs is not None:
                content["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self.prompt_logprobs or ())
        content |= self._tail(entries, choice.token_ids, choice.finish_reason, choice.stop_reason)
        if choice.disaggregated_params is not None:
            content["disaggregated_params"] = choice.disaggregated_params
        return content

    # ------------------------------------------------------------ stream

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes | None:
        """The event of one delta; None while there is no text yet, whose tokens then go out with the next event."""
        delta = self._merged(index, delta)
        first = index not in self._opened
        has_text = delta.text or delta.reasoning or (first and (self._job.chat or self._echoes))
        if not has_text and delta.finish_reason is None:
            self._pending[index] = delta
            return None
        self._opened.add(index)
        choice: dict[str, Any] = {"index": self._first_index + index}
        entries: Sequence[TokenEntry] = delta.entries
        if self._job.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or first else {})
            if delta.reasoning:
                choice["delta"]["reasoning_content"] = delta.reasoning
        else:
            before, entries = self._echoed(entries, begins=first)
            choice["text"] = before + delta.text
        choice |= self._tail(entries, delta.token_ids, delta.finish_reason, delta.stop_reason)
        return _encode(self._chunk_head() | {"choices": [choice]} | self._chunk_usage(usage))

    def _merged(self, index: int, delta: Delta) -> Delta:
        earlier = self._pending.pop(index, None)
        if earlier is None:
            return delta
        return dataclasses.replace(
            delta, token_ids=earlier.token_ids + delta.token_ids, entries=earlier.entries + delta.entries
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return _encode(self._chunk_head() | {"choices": [], "usage": usage.json()})

    def _chunk_usage(self, usage: Usage) -> dict[str, Any]:
        if self._usage_in_chunks:
            return {"usage": usage.json()}
        return {"usage": None} if self.wants_usage else {}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._job.chat else "text_completion")

    # ------------------------------------------------------------ both

    @property
    def _echoes(self) -> bool:
        return isinstance(self._job.request, CompletionRequest) and bool(self._job.request.echo)

    def _echoed(self, entries: Sequence[TokenEntry], begins: bool) -> tuple[str, Sequence[TokenEntry]]:
        """What goes before the text of a choice, and all entries of text that begins with the prompt's."""
        if not self._echoes:
            return "", entries
        if self._echo is None:
            logprobs = self.prompt_logprobs if self._with_logprobs else None
            skip = self._job.request.skip_special_tokens
            self._echo = echoed(self._tokenizer, self._job.prompt_ids, logprobs, skip)
        text, of_prompt = self._echo
        moved = [TokenEntry(entry.logprob, entry.offset + len(text)) for entry in entries]
        return (text, of_prompt + moved) if begins else ("", moved)

    def _head(self, name: str) -> dict[str, Any]:
        job = self._job
        return {"id": job.answer_id, "object": name, "created": job.created, "model": job.model}

    def _tail(
        self,
        entries: Sequence[TokenEntry],
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._with_logprobs:
            shape = chat_logprobs if self._job.chat else completion_logprobs
            logprobs = shape(self._tokenizer, entries)
        tail: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": stop_reason}
        if self._with_ids:
            tail["token_ids"] = token_ids
        return tail
