"""An engine that says what a test scripted: the surface of engine.client.EngineClient, without a process behind it.

It honours max_tokens, EOS, stop ids, n, hand-off ids and handles as the real one does; it knows nothing of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec

from engine.feeds import Feeds
from engine.messages import HandoffFetched, Output, Ready, Stats, Submit, Timing, TokenLogprob
from kvstore.errors import InternalError, ServingError
from kvstore.handoff import Handle, StartState
from kvstore.protocol import Fingerprint, KvEvent

FINGERPRINT = Fingerprint("m", "t", "float32", "block_nhd", 32, 4, 2, 32, 1)
EOS = 2

Answers = Callable[[Submit, int], Sequence[int]]
"""Token ids that choice i of a request would generate if nothing but EOS ended it."""


class FakeEngine:
    def __init__(
        self,
        answers: Answers,
        *,
        max_seq_len: int = 2048,
        group: int = 1,
        incarnation: str = "fake-1",
        vocab: int = 1024,
    ) -> None:
        """`group` tokens go into one output."""
        self.answers = answers
        self.group = group
        self.ready = Ready(FINGERPRINT, incarnation, 64, 32, 1024, max_seq_len, vocab, [EOS], ["shm"])
        self.stats = Stats(blocks_total=64, blocks_free=64)
        self.alive = True
        self.on_handoff_fetched: Callable[[HandoffFetched], None] | None = None
        self.cached_tokens = 0
        self.submitted: list[Submit] = []
        self.ended: list[str] = []  # request ids that ran to their end
        self.aborted: list[str] = []  # request ids closed before
        self.released: list[tuple[int, str | None]] = []
        self.delays: dict[str, float] = {}
        self.gate: asyncio.Event | None = None  # outputs wait for it ...
        self.free_outputs = 0  # ... after this many went through
        self.failure: tuple[int, ServingError] | None = None  # (outputs before it, what it is)
        self.events: asyncio.Queue[KvEvent] = asyncio.Queue()
        self.resident: list[bytes] = []
        self.feeds = Feeds()

    async def submit(self, request: Submit) -> AsyncGenerator[Output, None]:
        self.submitted.append(request)
        sent = 0
        try:
            for output in self._outputs(request):
                if self.failure is not None and sent >= self.failure[0]:
                    raise self.failure[1]
                if self.gate is not None and sent >= self.free_outputs:
                    await self.gate.wait()
                else:
                    await asyncio.sleep(0)
                yield output
                sent += 1
            if self.failure is not None:
                raise self.failure[1]
            self.ended.append(request.request_id)
        finally:
            if request.request_id not in self.ended:
                self.aborted.append(request.request_id)

    def release_handoff(self, handoff_id: int, incarnation: str | None = None) -> None:
        self.released.append((handoff_id, incarnation))

    def set_delays(self, seconds: dict[str, float]) -> None:
        self.delays = seconds

    async def subscribe_events(self) -> AsyncIterator[KvEvent]:
        yield KvEvent(stored=self.resident, cleared=True)
        while True:
            yield await self.events.get()

    def fetched(self, handle: Handle, ok: bool = True) -> None:
        """What the real engine reports when it is through with a handle's pages."""
        assert self.on_handoff_fetched is not None
        self.on_handoff_fetched(HandoffFetched("r", handle.handoff_id, handle.incarnation, handle.endpoint, ok))

    # ------------------------------------------------------------ scripts

    def _outputs(self, request: Submit) -> list[Output]:
        n = request.sampling.n
        per_choice = [self._choice(request, index) for index in range(n)]
        if request.handoff_id is not None:
            outputs = [self._first_only(outputs[0]) for outputs in per_choice]
            self._offer(request, outputs)
        else:
            rounds = max(len(outputs) for outputs in per_choice)
            outputs = [outputs[i] for i in range(rounds) for outputs in per_choice if i < len(outputs)]
        outputs[0].timing = Timing(scheduled=0.001, first_token=0.010, fetched=0.004 if request.handle else None)
        outputs[0].timing.fetch_path = "shm" if request.handle else None
        outputs[0].cached_tokens = self.cached_tokens
        if request.sampling.prompt_logprobs is not None:
            scored = request.prompt_ids[1:]
            outputs[0].prompt_logprobs = [TokenLogprob(token, -0.25, [(token, -0.25)]) for token in scored]
        return outputs

    def _choice(self, request: Submit, index: int) -> list[Output]:
        tokens, finish, stop_reason = self._generated(request, index)
        size = 1 if request.handoff_id is not None else self.group
        outputs = [
            Output(request.request_id, index, tokens[at : at + size], self._logprobs(request, tokens[at : at + size]))
            for at in range(0, len(tokens), size)
        ]
        start = next((s for s in request.handle.starts if s.index == index), None) if request.handle else None
        if start is not None and start.finish_reason is not None:
            outputs = [Output(request.request_id, index, [start.token], self._logprobs(request, [start.token]))]
            finish, stop_reason = start.finish_reason, start.stop_reason
        outputs[-1].finish_reason, outputs[-1].stop_reason = finish, stop_reason
        return outputs

    def _generated(self, request: Submit, index: int) -> tuple[list[int], str, int | None]:
        sampling = request.sampling
        tokens: list[int] = []
        for token in self.answers(request, index):
            tokens.append(token)
            if token == EOS and not sampling.ignore_eos:
                return tokens, "stop", None
            if token in sampling.stop_token_ids:
                return tokens, "stop", token
            if len(tokens) == sampling.max_tokens:
                break
        assert tokens, "a script without tokens"
        return tokens, "length", None

    def _logprobs(self, request: Submit, tokens: Sequence[int]) -> list[TokenLogprob] | None:
        if request.sampling.logprobs is None:
            return None
        return [
            TokenLogprob(token, -0.5, [(token, -0.5), (token + 1, -1.5)][: request.sampling.logprobs])
            for token in tokens
        ]

    def _first_only(self, output: Output) -> Output:
        ended = output.finish_reason is not None
        return output if ended else msgspec.structs.replace(output, finish_reason="not_finished")

    def _offer(self, request: Submit, outputs: list[Output]) -> None:
        if all(output.finish_reason != "not_finished" for output in outputs):
            return
        assert request.handoff_id is not None
        starts = [
            StartState(
                output.index,
                output.token_ids[0],
                request.sampling.seed + output.index,
                None if output.finish_reason == "not_finished" else output.finish_reason,
                output.stop_reason,
            )
            for output in outputs
        ]
        outputs[-1].handle = Handle(
            version=1,
            handoff_id=request.handoff_id,
            incarnation=self.ready.incarnation,
            fingerprint=self.ready.fingerprint.digest(),
            endpoint="127.0.0.1:1",
            prompt_tokens=len(request.prompt_ids),
            block_ids=[1],
            generations=[1],
            starts=starts,
            cached_tokens=self.cached_tokens,
            cache_salt=request.cache_salt,
        )


def script(text_or_tokens: Sequence[int]) -> Answers:
    """The same tokens for every request and choice."""
    return lambda request, index: text_or_tokens


def dying(engine: FakeEngine, after: int) -> FakeEngine:
    """`engine`, whose process ends after so many outputs."""
    engine.failure = (after, InternalError("the engine process has ended"))
    return engine
