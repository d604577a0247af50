"""Response bodies and stream chunks in OpenAI's shapes, with TensorRT-LLM's extra fields, as JSON bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from openai_api.assembly import Delta, TokenEntry
from openai_api.intake import Job
from openai_api.logprobs import chat_logprobs, completion_logprobs
from openai_api.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(slots=True)
class Usage:
    """`cached_tokens` of the prompt were not computed for this request. The prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


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

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ResponseWriter:
    """Writes the answer to one job. Chunks of one stream share id, created, model and object."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._with_ids = bool(job.request.return_token_ids) or not job.chat
        self._with_logprobs = job.sampling.logprobs is not None
        options = job.request.stream_options
        self.wants_usage = options is not None and options.include_usage
        self._usage_in_chunks = options is not None and options.continuous_usage_stats
        self._opened: set[int] = set()
        self._pending: dict[int, Delta] = {}  # tokens whose text is being held back

    # ------------------------------------------------------------ whole

    def body(self, choices: Sequence[ChoiceResult], usage: Usage, **extra: Any) -> bytes:
        """`extra` are fields of the response object. Choices are in index order."""
        name = "chat.completion" if self._job.chat else "text_completion"
        document = self._head(name) | {"choices": [self._choice(choice) for choice in choices], "usage": usage.json()}
        if self._job.request.return_token_ids:
            document["prompt_token_ids"] = self._job.prompt_ids
        return _encode(document | extra)

    def _choice(self, choice: ChoiceResult) -> dict[str, Any]:
        content: dict[str, Any] = {"index": choice.index}
        if self._job.chat:
            content["message"] = {"role": "assistant", "content": choice.text}
        else:
            content["text"] = choice.text
        content |= self._tail(choice.entries, choice.token_ids, choice.finish_reason, choice.stop_reason)
        if choice.disaggregated_params is not None:
            content["disaggregated_params"] = choice.disaggregated_params
        return content

    # ------------------------------------------------------------ stream

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes | None:
        """The event of one delta; None while there is no text yet, whose tokens then go out with the next event."""
        delta = self._merged(index, delta)
        first = index not in self._opened
        if not delta.text and delta.finish_reason is None and not (first and self._job.chat):
            self._pending[index] = delta
            return None
        self._opened.add(index)
        choice: dict[str, Any] = {"index": index}
        if self._job.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or first else {})
        else:
            choice["text"] = delta.text
        choice |= self._tail(delta.entries, delta.token_ids, delta.finish_reason, delta.stop_reason)
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

    def _head(self, name: str) -> dict[str, Any]:
        job = self._job
        return {"id": job.request_id, "object": name, "created": job.created, "model": job.model}

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
