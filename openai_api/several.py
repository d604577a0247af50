"""Requests with several prompts: each is a request of its own to the engine, and all are one answer.

The choices of prompt k are numbers k * n to k * n + n - 1. The first failure ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from kvstore.errors import ServingError
from openai_api.assembly import Delta
from openai_api.reply import Reply
from openai_api.responses import ChoiceResult, ResponseWriter, Usage, best_of
from openai_api.service import Generation, Service


class Several:
    def __init__(self, service: Service, generations: Sequence[Generation]) -> None:
        """At least one."""
        self._service = service
        self._generations = generations
        self._job = generations[0].job
        count = self._job.request.choices
        self._writers = [
            ResponseWriter(generation.job, service.tokenizer, place * count)
            for place, generation in enumerate(generations)
        ]

    async def answer(self, reply: Reply) -> None:
        """Raises the ServingError of the first that fails."""
        try:
            await (self._stream(reply) if self._job.stream else self._whole(reply))
        except* ServingError as errors:
            raise _first(errors) from None

    @property
    def _usage(self) -> Usage:
        each = [generation.usage for generation in self._generations]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
            sum(usage.cached_tokens for usage in each),
        )

    async def _whole(self, reply: Reply) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._service.collect(generation)) for generation in self._generations]
        choices = []
        for writer, generation, task in zip(self._writers, self._generations, tasks, strict=True):
            writer.prompt_logprobs = generation.prompt_logprobs
            results: list[ChoiceResult] = best_of(task.result(), generation.job.request.choices)
            choices += writer.choices(results)
        await reply.json(self._writers[0].document(choices, self._usage))

    async def _stream(self, reply: Reply) -> None:
        deltas: asyncio.Queue[tuple[int, int, Delta] | None] = asyncio.Queue()

        async def follow(place: int) -> None:
            async with contextlib.aclosing(self._service.deltas(self._generations[place])) as source:
                async for index, delta in source:
                    deltas.put_nowait((place, index, delta))
            deltas.put_nowait(None)

        async with asyncio.TaskGroup() as group:
            for place in range(len(self._generations)):
                group.create_task(follow(place))
            left = len(self._generations)
            while left:
                item = await deltas.get()
                if item is None:
                    left -= 1
                else:
                    await self._write(reply, *item)
        if self._writers[0].wants_usage:
            await reply.event(self._writers[0].usage_chunk(self._usage))
        await reply.done()

    async def _write(self, reply: Reply, place: int, index: int, delta: Delta) -> None:
        if not reply.streaming:
            await reply.open_stream()
        writer = self._writers[place]
        writer.prompt_logprobs = self._generations[place].prompt_logprobs
        chunk = writer.chunk(index, delta, self._usage)
        if chunk is not None:
            await reply.event(chunk)


def _first(errors: BaseExceptionGroup[ServingError]) -> ServingError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ServingError)
    return error
