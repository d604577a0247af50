"""The engine loop: admit → schedule → run → sample → emit.

One thread owns all state here and in the scheduler. Everything reaches it as an item of one inbox: messages of the HTTP
process, and what the transfer threads hand back. It blocks on the inbox while there is nothing to compute.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.delays import Delays
from engine.exchange import Exchange, PutDone
from engine.messages import (
    Abort,
    Events,
    Failed,
    FromEngine,
    Output,
    ReleaseHandoff,
    SetDelays,
    Shutdown,
    SnapshotEvents,
    Submit,
    ToEngine,
)
from engine.offers import Offers, Pages
from engine.outbox import Outbox
from engine.scheduler import Scheduler
from engine.sequence import Capacity, Choice, ModelFacts, Phase, Request, logprobs_of, open_request, sampled_of
from engine.step import Chunk, Sampled, SampleSpec
from engine.transfers import FetchJob
from kvstore.errors import HandoffRefused, InvalidRequest, ServingError
from kvstore.handoff import StartState
from kvstore.protocol import KvEvent
from kvstore.transceivers.base import BlockStore

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0


class Runner(Protocol):
    def run(self, chunks: Sequence[Chunk]) -> Any:
        """Logits [rows, vocabulary] of the chunks that want them, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The model layer as the loop uses it."""

    facts: ModelFacts
    runner: Runner
    sample: Callable[[Any, Sequence[SampleSpec]], list[Sampled]]
    copy_block: Callable[[int, int], None]  # from, to


class PoolStateChanged:
    """Posted when the block store has gone up or down, so that an idle engine tells."""


class ChannelClosed:
    """The HTTP process is gone."""


InboxItem = ToEngine | FetchJob | PutDone | PoolStateChanged | ChannelClosed


class EngineLoop:
    """`send` gets everything that one turn of the loop has to say, in order."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        blocks: BlockPool,
        pages: Pages,
        store: BlockStore | None,
        incarnation: str,
        inbox: queue.SimpleQueue[InboxItem],
        send: Callable[[list[FromEngine]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = Outbox(send, clock)
        self._say = self._outbox.say
        self.stats = self._outbox.stats
        self.delays = Delays(config.fault_injection)
        batch_size = min(config.max_batch_size, config.max_num_tokens)
        self.capacity = Capacity(blocks.num_blocks, config.tokens_per_block, batch_size)
        self.scheduler = Scheduler(blocks, self.capacity, config.max_num_tokens)
        self.exchange = Exchange(
            config, self.scheduler, pages, store, self.stats, self.delays, inbox.put, self._say, clock
        )
        self.offers = Offers(
            blocks,
            pages,
            self.stats,
            incarnation=incarnation,
            fingerprint=model.facts.fingerprint,
            endpoint=config.endpoint,
            timeout=config.handoff_timeout,
            shares_memory="shm" in config.transfers,
            puts_to_pool=self.exchange.puts,
            clock=clock,
        )
        self._config = config
        self._model = model
        self._blocks = blocks
        self._store = store
        self._incarnation = incarnation
        self._inbox = inbox
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._ended = False

    def __repr__(self) -> str:
        return f"EngineLoop({self.scheduler!r}, {self.offers.table!r})"

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until Shutdown or the end of the channel; `close` is the caller's."""
        while not self._ended:
            self.turn()

    def close(self) -> None:
        """End the transfer threads, with a limit."""
        self.exchange.close(_CLOSE_TIMEOUT)

    def turn(self) -> None:
        """One step, or one wait if there is nothing to compute; then everything that has come in meanwhile."""
        if self.scheduler.busy:
            self._dawdle("step")
            self._dawdle("prefill_chunk")
            self._step()
        else:
            self._wait_for_item(self._seconds_to_deadline())
        self._receive()
        self._admit()
        self._flush(pausing=not self.scheduler.busy)

    def _receive(self) -> None:
        while not self._ended:
            try:
                self._handle(self._inbox.get_nowait())
            except queue.Empty:
                break
        self.offers.table.expire()
        self.exchange.expire()

    def _admit(self) -> None:
        while (request := self.scheduler.admit()) is not None:
            prompt = request.choices[0]
            request.timing.scheduled = self._clock() - request.arrival
            request.cached_tokens = request.handle.cached_tokens if request.handle else prompt.computed
            self.stats.prompt_tokens_local += prompt.computed
            if not self.exchange.begin(request):
                self._start(request, satisfied=request.handle is None or not prompt.pending)

    def _step(self) -> None:
        if not self.scheduler.busy:
            return
        began = self._clock()
        batch = self.scheduler.schedule()
        logits = self._model.runner.run(batch.chunks)
        choices, rows, specs = batch.draws()
        if len(rows) > 1 and rows[-1] != len(rows) - 1:
            logits = logits[rows]
        sampled = self._model.sample(logits, specs) if specs else []
        for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
            self._advance(choice, len(chunk.tokens))
        self._emit(choices, sampled)
        for choice in batch.choices:
            if not choice.generated and not choice.pending and choice.request.phase is Phase.RUNNING:
                self._begin_choices(choice.request, [])
        self.stats.steps += 1
        self.stats.iter_latency_ms = (self._clock() - began) * 1000

    def _advance(self, choice: Choice, tokens: int) -> None:
        if not choice.generated:
            self.stats.prompt_tokens_computed += tokens
        self.exchange.publish(self.scheduler.advance(choice, tokens))

    def _emit(self, choices: Sequence[Choice], sampled: Sequence[Sampled]) -> None:
        first: dict[str, list[Sampled]] = {}
        for choice, drawn in zip(choices, sampled, strict=True):
            if choice.generated:
                self._take_token(choice, drawn)
            else:
                first.setdefault(choice.request.id, []).append(drawn)
        for request_id, draws in first.items():
            self._begin_choices(self._requests[request_id], draws)

    # ------------------------------------------------------------ a request's way

    def _start(self, request: Request, satisfied: bool) -> None:
        """All KV that could be had is there; compute the rest, if a failed hand-off may be made up for."""
        if not satisfied and self._config.on_handoff_failure == "fail":
            error = HandoffRefused("the KV blocks of the hand-off could not be fetched, and on_handoff_failure is fail")
            self._fail(request, error)
            return
        self.scheduler.start(request)
        if request.handle is not None and not request.choices[0].pending:
            self._begin_choices(request, [])

    def _begin_choices(self, request: Request, draws: Sequence[Sampled]) -> None:
        """The prompt's KV is complete: take the first token of each choice, just drawn or come with the hand-off."""
        choices = request.open_choices()
        if request.handle is not None:
            starts = sorted(request.handle.starts, key=lambda start: start.index)
            draws = [sampled_of(start) for start in starts]
            for choice, start in zip(choices, starts, strict=True):
                choice.seed = start.seed
        request.timing.first_token = self._clock() - request.arrival
        stops = [choice.append(drawn.token) for choice, drawn in zip(choices, draws, strict=True)]
        self.stats.generated_tokens += len(choices)
        if request.handoff_id is not None:
            self._hand_over(request, draws, stops)
            return
        for choice, drawn, stop in zip(choices, draws, stops, strict=True):
            self._say(self._output(choice, drawn, stop))
        for source, copy in self.scheduler.fork(request):
            self._model.copy_block(source, copy)
        self._forget_if_over(request)

    def _take_token(self, choice: Choice, drawn: Sampled) -> None:
        stop = choice.append(drawn.token)
        self.stats.generated_tokens += 1
        self._say(self._output(choice, drawn, stop))
        if choice.finish_reason is not None:
            self.scheduler.finish(choice)
            self._forget_if_over(choice.request)

    def _hand_over(self, request: Request, draws: Sequence[Sampled], stops: Sequence[int | None]) -> None:
        """The end of a context-only request. If every choice has finished with its first token, nothing is offered."""
        starts = [
            StartState(
                index=choice.index,
                token=drawn.token,
                seed=choice.seed,
                finish_reason=choice.finish_reason,
                stop_reason=stop,
                logprob=drawn.logprob,
                top_logprobs=drawn.top,
            )
            for choice, drawn, stop in zip(request.choices, draws, stops, strict=True)
        ]
        outputs = [self._output(*each) for each in zip(request.choices, draws, stops, strict=True)]
        for output, start in zip(outputs, starts, strict=True):
            output.starts = [start]
            output.finish_reason = start.finish_reason or "not_finished"
        if any(start.finish_reason is None for start in starts):
            outputs[-1].handle = self.offers.offer(request, starts)
        for output in outputs:
            self._say(output)
        self._drop(request)

    def _output(self, choice: Choice, drawn: Sampled, stop: int | None) -> Output:
        request = choice.request
        output = Output(
            request_id=request.id,
            index=choice.index,
            token_ids=[drawn.token],
            logprobs=logprobs_of(drawn),
            finish_reason=choice.finish_reason,
            stop_reason=stop,
        )
        if not request.announced:
            request.announced = True
            output.cached_tokens = request.cached_tokens
            output.timing = request.timing
        return output

    def _forget_if_over(self, request: Request) -> None:
        if all(choice.finish_reason is not None for choice in request.choices):
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.exchange.abort(request)
        self.scheduler.end(request)
        self._requests.pop(request.id, None)

    def _fail(self, request: Request, error: ServingError) -> None:
        self._say(Failed(request.id, error.code, error.message, error.param))
        self._drop(request)

    # ------------------------------------------------------------ what comes in

    def _handle(self, item: InboxItem) -> None:
        match item:
            case Submit():
                self._submit(item)
            case Abort():
                if (request := self._requests.get(item.request_id)) is not None:
                    self._drop(request)
            case ReleaseHandoff():
                self._release(item)
            case FetchJob():
                self._fetched(item)
            case PutDone():
                self.exchange.put_done(item)
            case SnapshotEvents():
                self._outbox.say_events(self._blocks.drain_events())
                stored = self._blocks.resident_keys()
                self._say(Events([KvEvent(cleared=True, stored=stored)], snapshot_id=item.snapshot_id))
            case SetDelays():
                self.delays.set(item.seconds)
            case Shutdown() | ChannelClosed():
                self._ended = True
            case PoolStateChanged():
                pass  # Stats carries it, after this turn

    def _submit(self, submit: Submit) -> None:
        if submit.request_id in self._requests:
            log.error("request id %s is in use; the second request is ignored", submit.request_id)
            return
        try:
            if submit.handoff_id is not None and self._is_handoff_in_use(submit.handoff_id):
                raise InvalidRequest(f"disagg_request_id: {submit.handoff_id} is in use", param="disaggregated_params")
            request = open_request(submit, self._clock(), self._model.facts, self.capacity)
        except ServingError as error:
            self._say(Failed(submit.request_id, error.code, error.message, error.param))
            return
        self._requests[request.id] = request
        self.exchange.accept(request)
        self.scheduler.add(request)

    def _is_handoff_in_use(self, handoff_id: int) -> bool:
        return handoff_id in self.offers.table or any(
            request.handoff_id == handoff_id for request in self._requests.values()
        )

    def _release(self, message: ReleaseHandoff) -> None:
        """A release may overtake the offer: then the prefill is of no use to anybody."""
        if message.incarnation is None:
            for request in [each for each in self._requests.values() if each.handoff_id == message.handoff_id]:
                self._fail(request, HandoffRefused(f"hand-off {message.handoff_id} was released during prefill"))
                return
        self.offers.release(message)

    def _fetched(self, job: FetchJob) -> None:
        request = self._requests.get(job.request_id)
        if request is not None and request.fetch is not job:
            request = None
        tokens = self.exchange.fetched(job, request)
        if request is None:
            return
        found = self.scheduler.advance(request.choices[0], tokens)
        if job.handle is None:
            request.cached_tokens += tokens
        elif not job.handle.pool:
            self.exchange.publish(found)
        self._start(request, job.satisfied)

    # ------------------------------------------------------------ waiting, and what goes out

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [self.offers.table.next_deadline(), self.exchange.next_deadline()]
        seconds = [deadline - self._clock() for deadline in deadlines if deadline is not None]
        return max(0.0, min(seconds)) if seconds else None

    def _wait_for_item(self, timeout: float | None) -> None:
        try:
            self._handle(self._inbox.get(timeout=timeout))
        except queue.Empty:
            pass

    def _dawdle(self, stage: str) -> None:
        """A delay of the test seam; what comes in meanwhile is handled."""
        start = self._clock()
        while self._is_due(stage) and not self._ended:
            left = start + self.delays.of(stage) - self._clock()
            if left <= 0:
                return
            self._flush(pausing=True)
            self._wait_for_item(left)

    def _is_due(self, stage: str) -> bool:
        if stage == "prefill_chunk":
            return self.scheduler.prefilling
        return self.scheduler.busy

    def _flush(self, pausing: bool) -> None:
        self._outbox.flush(self.scheduler, self.offers, self._store, pausing)
