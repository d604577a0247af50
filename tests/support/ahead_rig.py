"""Two engine loops joined for generation_first as their HTTP processes join them; the test may touch every message."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from engine_rig import Result, Worker

from engine.messages import (
    Arrival,
    FollowHandoff,
    FromEngine,
    HandoffFetched,
    HandoffProgress,
    HandoffWanted,
    SamplingParams,
    UnfollowHandoff,
)

IDS = itertools.count(2**41)


class AheadWorker(Worker):
    """`heard(message)` gets the messages of generation_first."""

    def __init__(self, name: str = "w", **options: Any) -> None:
        super().__init__(name, **options)
        self.heard: Callable[[FromEngine], None] = lambda message: None

    def _take(self, messages: list[FromEngine]) -> None:
        super()._take(messages)
        for message in messages:
            if isinstance(message, HandoffProgress | HandoffWanted | HandoffFetched):
                self.heard(message)


class AheadPair:
    """`lose(message)`: whether a message is dropped; `double`: whether it is delivered twice."""

    def __init__(self, context: AheadWorker, generation: AheadWorker) -> None:
        self.context = context
        self.generation = generation
        self.lose: Callable[[FromEngine], bool] = lambda message: False
        self.double: Callable[[FromEngine], bool] = lambda message: False
        self.requests: dict[int, str] = {}  # by hand-off
        self.seen: list[FromEngine] = []
        context.heard = self._from_context
        generation.heard = self._from_generation

    def _from_context(self, message: FromEngine) -> None:
        self.seen.append(message)
        if not isinstance(message, HandoffProgress) or self.lose(message):
            return
        request_id = self.requests.get(message.handoff_id)
        if request_id is not None:
            fields = {name: getattr(message, name) for name in Arrival.__struct_fields__ if name != "request_id"}
            for _ in range(2 if self.double(message) else 1):
                self.generation.inbox.put(Arrival(request_id, **fields))

    def _from_generation(self, message: FromEngine) -> None:
        self.seen.append(message)
        if self.lose(message):
            return
        for _ in range(2 if self.double(message) else 1):
            match message:
                case HandoffWanted(wanted=True):
                    self.requests[message.handoff_id] = message.request_id
                    self.context.inbox.put(FollowHandoff(message.handoff_id))
                case HandoffWanted():
                    self.context.inbox.put(UnfollowHandoff(message.handoff_id))
                    self.context.release(message.handoff_id)
                case HandoffFetched():
                    self.context.release(message.handoff_id, message.incarnation)

    def submit_context(self, handoff_id: int, prompt: Sequence[int], sampling: SamplingParams) -> str:
        return self.context.submit(prompt, sampling, handoff_id=handoff_id, waits_for_reader=True)

    def submit_generation(self, handoff_id: int, prompt: Sequence[int], sampling: SamplingParams) -> str:
        return self.generation.submit(prompt, sampling, awaits=handoff_id, source="ctx:1")

    def ask(self, prompt: Sequence[int], sampling: SamplingParams, context_first: bool = False) -> Result:
        handoff_id = next(IDS)
        legs = [self.submit_generation, self.submit_context]
        ids = [leg(handoff_id, prompt, sampling) for leg in (reversed(legs) if context_first else legs)]
        return self.generation.result(ids[1 if context_first else 0])

    def wait_baseline(self) -> None:
        for worker in (self.context, self.generation):
            readers = worker.loop.readers
            worker.wait(lambda w=worker, r=readers: not (len(w.loop.landings) or r._held or r._announced))  # type: ignore[misc]
            worker.wait_baseline()
