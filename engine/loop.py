"""The engine loop: admit → schedule → run → sample → emit.

One thread owns all state here and in the scheduler. Everything reaches it as an item of one inbox: messages of the HTTP
process, and what the transfer threads hand back. It blocks on the inbox while there is nothing to compute.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.delays import Delays
from engine.drawing import Drawn, draw
from engine.exchange import Exchange, PutDone, Settled
from engine.guided import GuideCompiled, GuideError
from engine.landings import Landings
from engine.messages import (
    Abort,
    Arrival,
    Events,
    Failed,
    FollowHandoff,
    FromEngine,
    ReleaseHandoff,
    SetDelays,
    Shutdown,
    SnapshotEvents,
    Submit,
    ToEngine,
    UnfollowHandoff,
)
from engine.model_port import Model
from engine.offers import Offers, Pages
from engine.outbox import Outbox
from engine.outputs import output_of, start_of
from engine.readers import Readers
from engine.reception import Reception
from engine.rules import rules_of
from engine.scheduler import Scheduler
from engine.sequence import Capacity, Choice, Phase, Request, sampled_of
from engine.statistics import Statistics
from engine.step import Sampled
from engine.transfers import FetchJob, FetchJobs
from kvstore.errors import HandoffRefused, InternalError, ServingError
from kvstore.transceivers.base import BlockStore, Transceiver

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0


class PoolStateChanged:
    """Posted when the block store has gone up or down, so that an idle engine tells."""


class ChannelClosed:
    """The HTTP process is gone."""


InboxItem = ToEngine | FetchJob | PutDone | Settled | GuideCompiled | PoolStateChanged | ChannelClosed


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
        transceivers: Mapping[str, Transceiver] | None = None,
        fetcher: FetchJobs | None = None,
    ) -> None:
        self._outbox = Outbox(send, clock)
        self._say = self._outbox.say
        self.stats = self._outbox.stats
        self.delays = Delays(config.fault_injection)
        batch_size = min(config.max_batch_size, config.max_num_tokens)
        self.capacity = Capacity(blocks.num_blocks, config.tokens_per_block, batch_size)
        self.scheduler = Scheduler(
            blocks, self.capacity, config.max_num_tokens, rules_of(config), copy_block=model.copy_block
        )
        self._statistics = Statistics(
            config, self.scheduler, self.stats, model.facts.max_seq_len, model.gpu_memory, clock
        )
        self.exchange = Exchange(
            config, self.scheduler, pages, store, self.stats, self.delays, inbox.put, self._say, clock, transceivers,
            fetcher,
        )  # fmt: skip
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
            transceivers=(transceivers or {}).values(),
            identity=model.facts.identity,
        )
        self._config = config
        self._model = model
        self._blocks = blocks
        self._store = store
        self._incarnation = incarnation
        self._inbox = inbox
        self._clock = clock
        self.readers = Readers(self.scheduler, self.offers, self._say, config.handoff_timeout, clock)
        self.landings = Landings(
            self.scheduler, self.exchange, model.facts, config.fetch_timeout, self._say,
            self._start, self._fail, self._restart,
        )  # fmt: skip
        self.reception = Reception(
            self.scheduler, self.exchange, self.offers, self.readers, model.facts, self.capacity, model.guides,
            inbox.put, self._say, self._fail, clock,
        )  # fmt: skip
        self._requests = self.reception.requests
        self._ended = False

    def __repr__(self) -> str:
        return f"EngineLoop({self.scheduler!r}, {self.offers.table!r})"

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until Shutdown or the end of the channel; `close` is the caller's."""
        while not self._ended:
            self.turn()

    def close(self) -> None:
        """End the threads, with a limit."""
        self.exchange.close(_CLOSE_TIMEOUT)
        self.reception.close(_CLOSE_TIMEOUT)

    def turn(self) -> None:
        """One step, or one wait if there is nothing to compute; then everything that has come in meanwhile."""
        if self.scheduler.busy:
            self._dawdle("step")
            self._dawdle("prefill_chunk")
            self.step()
        else:
            self._wait_for_item(self.seconds_to_deadline())
        self.catch_up()

    def catch_up(self) -> None:
        """Between two steps: what has come in meanwhile, whom there is room for, and what is to be said."""
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
        for request in self.readers.expire():
            self._fail(request, HandoffRefused(f"no generation worker has come for hand-off {request.handoff_id}"))

    def _admit(self) -> None:
        self.scheduler.resume()
        while (request := self.scheduler.admit()) is not None:
            prompt = request.choices[0]
            request.timing.scheduled = self._clock() - request.arrival
            self._statistics.admitted(request)
            # Whole blocks, as everywhere else: of a partly matching one nobody else would know.
            cached = len(prompt.keys) * self.capacity.block_size
            request.cached_tokens = request.handle.cached_tokens if request.handle else cached
            self.stats.prompt_tokens_local += prompt.computed
            if not self.landings.begin(request) and not self.exchange.begin(request):
                self._start(request, satisfied=request.handle is None or not prompt.pending)

    def step(self) -> None:
        if not self.scheduler.busy:
            return
        began = self._clock()
        self._statistics.step_begins()
        batch = self.scheduler.schedule()
        logits = self._model.runner.run(batch.chunks)
        drawn = draw(self._model.sample, logits, batch)
        for request in drawn.failed:
            self._fail(request, InternalError("the model gave no probabilities to draw a token from (NaN or infinity)"))
        for choice, chunk in zip(batch.choices, batch.chunks, strict=True):
            if choice.request.phase is Phase.RUNNING:
                self._advance(choice, len(chunk.tokens))
        self._emit(drawn)
        for choice in batch.choices:
            if not choice.generated and not choice.pending and choice.request.phase is Phase.RUNNING:
                self._begin_choices(choice.request, [])
        self.stats.steps += 1
        self.stats.iter_latency_ms = (self._clock() - began) * 1000
        self._statistics.step_ended()

    def _advance(self, choice: Choice, tokens: int) -> None:
        if not choice.generated:
            self.stats.prompt_tokens_computed += tokens
        elif tokens > 1:
            self.stats.tokens_recomputed += tokens - 1  # after a preemption; the last one is due anyway
        self.exchange.publish(self.scheduler.advance(choice, tokens))
        if not choice.generated:
            self.readers.progress(choice.request)

    def _emit(self, drawn: Drawn) -> None:
        for choice, token in drawn.next:
            self._take_token(choice, token)
        for request, tokens in drawn.first:
            self._begin_choices(request, tokens)

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
        self._statistics.first_token(request)
        try:
            stops = [choice.append(drawn.token) for choice, drawn in zip(choices, draws, strict=True)]
        except GuideError as error:
            self._fail(request, HandoffRefused(f"the first token of the hand-off: {error}"))
            return
        self.stats.generated_tokens += len(choices)
        if request.handoff_id is not None:
            self._hand_over(request, draws, stops)
            return
        for choice, drawn, stop in zip(choices, draws, stops, strict=True):
            self._say(output_of(choice, drawn, stop))
        for source, copy in self.scheduler.fork(request):
            self._model.copy_block(source, copy)
        self._forget_if_over(request)

    def _take_token(self, choice: Choice, drawn: Sampled) -> None:
        stop = choice.append(drawn.token)
        self.stats.generated_tokens += 1
        self._say(output_of(choice, drawn, stop))
        if choice.finish_reason is not None:
            self.scheduler.finish(choice)
            self._forget_if_over(choice.request)

    def _hand_over(self, request: Request, draws: Sequence[Sampled], stops: Sequence[int | None]) -> None:
        """The end of a context-only request. If every choice has finished with its first token, nothing is offered."""
        each = list(zip(request.choices, draws, stops, strict=True))
        starts = [start_of(*one) for one in each]
        outputs = [output_of(*one) for one in each]
        for output, start in zip(outputs, starts, strict=True):
            output.starts = [start]
            output.finish_reason = start.finish_reason or "not_finished"
        if any(start.finish_reason is None for start in starts):
            outputs[-1].handle = self.offers.offer(request, starts)
        self.readers.complete(request, starts, outputs[-1].handle)
        for output in outputs:
            self._say(output)
        self._drop(request)

    def _forget_if_over(self, request: Request) -> None:
        if all(choice.finish_reason is not None for choice in request.choices):
            self._drop(request)

    def _drop(self, request: Request, reason: str = "the request was aborted") -> None:
        self.readers.drop(request, reason)
        self.landings.drop(request)
        self.exchange.abort(request)
        self.scheduler.end(request)
        self._statistics.ended(request)
        self._requests.pop(request.id, None)

    def _fail(self, request: Request, error: ServingError) -> None:
        self._say(Failed(request.id, error.code, error.message, error.param))
        self._drop(request, error.message)

    # ------------------------------------------------------------ what comes in

    def _handle(self, item: InboxItem) -> None:
        match item:
            case Submit():
                self.reception.submit(item)
            case Abort():
                if (request := self._requests.get(item.request_id)) is not None:
                    self._drop(request)
            case ReleaseHandoff():
                self._release(item)
            case FollowHandoff():
                self.readers.follow(item.handoff_id)
            case UnfollowHandoff():
                self.readers.unfollow(item.handoff_id)
            case Arrival():
                self.landings.arrived(item)
            case FetchJob():
                if item.ahead:
                    self.landings.fetched(item)
                else:
                    self._fetched(item)
            case PutDone():
                self.exchange.put_done(item)
            case Settled():
                self.exchange.settled(item)
            case GuideCompiled():
                self.reception.compiled(item)
            case SnapshotEvents():
                self._outbox.say_events(self._blocks.drain_events())
                self._say(Events([self._blocks.snapshot()], snapshot_id=item.snapshot_id))
            case SetDelays():
                self.delays.set(item.seconds)
            case Shutdown() | ChannelClosed():
                self._ended = True
            case PoolStateChanged():
                pass  # Stats carries it, after this turn

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
        if job.unsettled is not None:
            self._restart(request)
            return
        found = self.scheduler.advance(request.choices[0], tokens)
        if job.handle is None:
            request.cached_tokens += tokens
        elif not job.handle.pool:
            self.exchange.publish(found)
        self._start(request, job.satisfied)

    def _restart(self, request: Request) -> None:
        """Its blocks may still be written to: it gives them up, and is computed in others."""
        if self._config.on_handoff_failure == "fail":
            self._start(request, satisfied=False)
            return
        request.fetch = None
        self.scheduler.restart(request)

    # ------------------------------------------------------------ waiting, and what goes out

    def seconds_to_deadline(self) -> float | None:
        """Until something runs out that nobody else would tell of."""
        deadlines = [each.next_deadline() for each in (self.offers.table, self.exchange, self.readers)]
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
        return self.scheduler.prefilling if stage == "prefill_chunk" else self.scheduler.busy

    def _flush(self, pausing: bool) -> None:
        self._outbox.flush(self.scheduler, self.offers, self._store, pausing, self._statistics)
