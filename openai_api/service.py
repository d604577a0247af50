"""One request on an engine: outputs to text, usage and timing, then the answer as a body or as a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from engine.messages import Output, Submit, Timing, TokenLogprob
from kvstore.errors import InternalError, ServingError
from kvstore.handoff import Handle
from openai_api.assembly import ChoiceText, Delta
from openai_api.engine_port import Engine
from openai_api.intake import Job
from openai_api.reply import Reply
from openai_api.responses import ChoiceResult, ResponseWriter, Usage, best_of
from openai_api.tokenizer import Tokenizer


class Observer(Protocol):
    """Told about every request that reached an engine. Times in seconds."""

    def submitted(self) -> None: ...

    def first_token(self, seconds: float, timing: Timing | None) -> None: ...

    def finished(self, generation: Generation, seconds: float) -> None: ...

    def failed(self, error: ServingError) -> None: ...


class Generation:
    """The state of one request while an engine works on it."""

    def __init__(self, job: Job, submit: Submit, tokenizer: Tokenizer, usage: Usage | None = None) -> None:
        """`usage` is given when another worker did the prefill and counted the prompt."""
        self.job = job
        self.submit = submit
        self.texts = [ChoiceText(tokenizer, job.text) for _ in range(job.sampling.n)]
        self.timing: Timing | None = None
        self.handle: Handle | None = None
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.started = False
        self._running = set(range(job.sampling.n))  # choices that the engine has not ended
        self._counted_elsewhere = usage is not None
        self._usage = usage or Usage(len(job.prompt_ids))

    @property
    def finished(self) -> bool:
        return all(text.finished for text in self.texts)

    @property
    def engine_ended(self) -> bool:
        """The engine gave its last output, so that closing it aborts nothing."""
        return not self._running

    @property
    def continues(self) -> bool:
        """Another worker counts the prompt and the first token of each choice."""
        return self.submit.handle is not None or self.submit.awaits is not None

    @property
    def usage(self) -> Usage:
        tokens = sum(text.token_count for text in self.texts)
        reasoning = None
        if self.job.text.reasoning is not None:
            reasoning = sum(text.reasoning_count for text in self.texts)
        return Usage(self._usage.prompt_tokens, tokens, self._usage.cached_tokens, reasoning)

    def take(self, output: Output) -> Delta | None:
        """The new part of the output's choice; None for a choice that has ended."""
        self.started = True
        if output.timing is not None:
            self.timing = output.timing
        if output.cached_tokens is not None and not self._counted_elsewhere:
            self._usage.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.handle is not None:
            self.handle = output.handle
        if output.finish_reason is not None:
            self._running.discard(output.index)
        text = self.texts[output.index]
        return None if text.finished else text.feed(output)


def timing_headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    """`Server-Timing` for requests that ask for it, durations in milliseconds, `first_token` from the start."""
    timing = generation.timing
    if timing is None or not generation.job.return_metrics:
        return []
    spans: list[tuple[str, float, str | None]] = [("queue", timing.scheduled, None)]
    prefill_from = timing.scheduled
    if timing.fetched is not None:
        spans.append(("handoff", timing.fetched - timing.scheduled, timing.fetch_path))
        prefill_from = timing.fetched
    spans.append(("prefill", timing.first_token - prefill_from, None))
    spans.append(("first_token", timing.first_token, None))
    entries = [
        f"{name}{f';desc={note}' if note else ''};dur={max(seconds, 0) * 1000:.3f}" for name, seconds, note in spans
    ]
    return [(b"server-timing", ", ".join(entries).encode())]


class Service:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, observer: Observer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._observer = observer

    async def complete(self, job: Job, reply: Reply) -> None:
        """Prefill and decode here. `job.others` are not looked at."""
        await self.answer(self.generation(job), reply)

    def generation(self, job: Job) -> Generation:
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            priority=job.priority,
            cache_salt=job.request.cache_salt or "",
        )
        return Generation(job, submit, self.tokenizer)

    async def answer(self, generation: Generation, reply: Reply) -> None:
        """Run to the end and send the answer. Raises ServingError; the reply turns it into a status or an event."""
        if generation.job.stream:
            await self._stream(generation, reply)
        else:
            await self._whole(generation, reply)

    async def collect(self, generation: Generation) -> list[ChoiceResult]:
        """All choices, when the engine has no more outputs."""
        choices = [ChoiceResult(index) for index in range(len(generation.texts))]
        async with contextlib.aclosing(self.deltas(generation)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        return choices

    async def deltas(self, generation: Generation) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice index, new part) as the engine gives them, also empty ones. Ends when all choices have ended, or
        when the engine has no more (a context-only request). Closing it aborts the request."""
        start = time.monotonic()
        self._observer.submitted()
        try:
            async with contextlib.aclosing(self.engine.submit(generation.submit)) as outputs:
                async for output in outputs:
                    if not generation.started:
                        self._observer.first_token(time.monotonic() - start, output.timing)
                    delta = generation.take(output)
                    if delta is not None:
                        yield output.index, delta
                    if generation.finished and not generation.engine_ended:
                        break
            if not generation.finished and generation.submit.handoff_id is None:
                raise InternalError("the engine stopped before the answer was complete")
        except ServingError as error:
            self._observer.failed(error)
            raise
        self._observer.finished(generation, time.monotonic() - start)

    async def _whole(self, generation: Generation, reply: Reply) -> None:
        choices = best_of(await self.collect(generation), generation.job.request.choices)
        writer = ResponseWriter(generation.job, self.tokenizer)
        writer.prompt_logprobs = generation.prompt_logprobs
        await reply.json(writer.body(choices, generation.usage), headers=timing_headers(generation))

    async def _stream(self, generation: Generation, reply: Reply) -> None:
        writer = ResponseWriter(generation.job, self.tokenizer)
        async with contextlib.aclosing(self.deltas(generation)) as deltas:
            async for index, delta in deltas:
                if not reply.streaming:
                    await reply.open_stream(timing_headers(generation))
                    writer.prompt_logprobs = generation.prompt_logprobs
                chunk = writer.chunk(index, delta, generation.usage)
                if chunk is not None:
                    await reply.event(chunk)
        if writer.wants_usage:
            await reply.event(writer.usage_chunk(generation.usage))
        await reply.done()
