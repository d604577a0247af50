"""An engine that computes nothing: scripted tokens after the time that a real one would take.

Scheduler, block pool, prefix cache, hand-offs, statistics and the client's side are the real ones; only the model, the
bytes and the process are missing. No thread, and no timer while idle: hundreds fit into one process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from engine.blocks import BlockPool
from engine.cache_events import HASH_ALGO
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.host_tier import HostTier
from engine.loop import EngineLoop, InboxItem
from engine.messages import Events, FromEngine, Output, Ready, Shutdown, ToEngine
from engine.mock_clock import Clock, RealClock, Timer
from engine.mock_profile import Faults, MockProfile, Script
from engine.model_port import Model
from engine.sequence import ModelFacts, Request
from engine.step import Chunk, Sampled, SampleSpec
from engine.transfers import FetchJob
from kvstore.handoff import SharedMemory
from kvstore.protocol import Fingerprint

log = logging.getLogger(__name__)

_NUM_BLOCKS = 4096
_MAX_SEQ_LEN = 8192
_KNOWN_PROMPTS = 4096


class MockNetwork:
    """The mock engines that reach each other's pages. A handle of one that is not known here is taken as good: it may
    live in another process."""

    def __init__(self) -> None:
        self._engines: dict[str, MockEngine] = {}
        self._gone: set[str] = set()

    def join(self, incarnation: str, engine: MockEngine) -> None:
        self._engines[incarnation] = engine

    def leave(self, incarnation: str) -> None:
        self._engines.pop(incarnation, None)
        self._gone.add(incarnation)

    def failure(self, job: FetchJob) -> str | None:
        """Why the pages that a job wants cannot be read."""
        handle = job.handle
        if handle is None:
            return "no_path"
        if handle.incarnation in self._gone:
            return "shm"
        engine = self._engines.get(handle.incarnation)
        if engine is not None and not job.ahead and handle.handoff_id not in engine.core.offers.table:
            return "stale"
        return None


class MockEngine(EngineClient):
    """An `EngineClient` with the engine inside. Everything runs on the event loop that is running when it is made."""

    def __init__(
        self,
        config: EngineConfig,
        profile: MockProfile,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Clock | None = None,
        network: MockNetwork | None = None,
    ) -> None:
        super().__init__()
        # Its ways to other workers are its own, and so is what it answers.
        config = msgspec.structs.replace(config, transfers=(), pool=None, fault_injection=True)
        self._clock: Clock = clock or RealClock()
        self._network = network or MockNetwork()
        self._profile = profile
        self._faults: Faults = profile.faults
        self._inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self._timer: Timer | None = None
        self._stepping = False
        self._events_told = 0
        self._tokens_told = 0
        self.incarnation = secrets.token_hex(8)
        size = profile.block_bytes * config.tokens_per_block // 32
        blocks = config.num_blocks or -(-(config.max_tokens or 0) // config.tokens_per_block) or _NUM_BLOCKS
        self._pages = _Pages(blocks, size)
        fingerprint = Fingerprint("mock", "mock", "none", "none", config.tokens_per_block, 1, 1, 1, 1)
        facts = ModelFacts(
            fingerprint.digest(), vocab_size, config.max_seq_len or _MAX_SEQ_LEN, frozenset(eos_token_ids), fingerprint
        )
        script = Script(profile.answers, vocab_size, eos_token_ids[0])
        self._model = _Model(self, profile, script)
        self.core = self._make_core(config, facts)
        self._ready.set_result(self._ready_message(config, facts, fingerprint))
        self._network.join(self.incarnation, self)
        self._wake()

    def _make_core(self, config: EngineConfig, facts: ModelFacts) -> EngineLoop:
        def copy(source: int, target: int) -> None:
            pass  # there are no bytes

        places = config.host_cache_size // self._pages.block_bytes
        host = HostTier(places, copy, copy) if places else None
        return EngineLoop(
            config,
            Model(facts, self._model, self._model.sample, copy),
            BlockPool(self._pages.num_blocks, config.enable_block_reuse, self._pages.bump, host, self._clock.time),
            self._pages,
            None,
            self.incarnation,
            self._inbox,
            self._take,
            clock=self._model.time,
            transceivers={},
            fetcher=_Fetches(self, self._profile, self._network),
        )

    def _ready_message(self, config: EngineConfig, facts: ModelFacts, fingerprint: Fingerprint) -> Ready:
        return Ready(
            fingerprint=fingerprint,
            incarnation=self.incarnation,
            num_blocks=self._pages.num_blocks,
            block_size=config.tokens_per_block,
            block_bytes=self._pages.block_bytes,
            max_seq_len=facts.max_seq_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=sorted(facts.eos_token_ids),
            transfers=["shm"],
            transfer_choice="mock: times without bytes",
            kv_cache_hash_algo=HASH_ALGO if config.event_buffer_max_size else None,
        )

    @property
    def pid(self) -> int:
        return 0

    @property
    def restart_after(self) -> float | None:
        """Seconds after its death at which its owner is to start another one in its place."""
        return self._faults.restart_after

    def die(self) -> None:
        """As if the process was killed."""
        if self.alive:
            self._end()
            self._died()

    async def close(self, timeout: float = 10.0) -> None:
        self.die()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._network.leave(self.incarnation)
        self.core.close()

    # ------------------------------------------------------------ messages

    def _write(self, message: ToEngine) -> None:
        if self.alive and not isinstance(message, Shutdown):
            self.post(message)

    def post(self, item: InboxItem) -> None:
        """For the engine to see before its next step."""
        self._inbox.put(item)
        self._wake()

    def _take(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if not self.alive:
                return
            if isinstance(message, Output):
                self._tokens_told += len(message.token_ids)
                if self._faults.die_at_token is not None and self._tokens_told >= self._faults.die_at_token:
                    log.warning("mock engine %s dies at token %d", self.incarnation, self._tokens_told)
                    self.die()
                    return
            elif isinstance(message, Events) and message.snapshot_id is None and self._faults.drop_events:
                message = self._without_dropped(message)
            self._handle(message)

    def _without_dropped(self, message: Events) -> Events:
        first = self._events_told + 1
        self._events_told += len(message.events)
        kept = [event for number, event in enumerate(message.events, first) if number not in self._faults.drop_events]
        return Events(kept)

    # ------------------------------------------------------------ time

    def _wake(self) -> None:
        if self._stepping or not self.alive:
            return  # it is looked at when the step is over
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(0, self._advance)

    def _advance(self) -> None:
        """The step is over, or something has come in."""
        self._stepping = False
        self._timer = None
        self.core.catch_up()
        if not self.alive:
            return
        if self.core.scheduler.busy:
            self._stepping = True
            self.core.step()
            self._timer = self._clock.call_later(self._model.end_step(self._stall()), self._advance)
        elif (left := self.core.seconds_to_deadline()) is not None:
            self._timer = self._clock.call_later(left, self._advance)

    def _stall(self) -> float:
        return self._faults.stall_steps.get(self.core.stats.steps, 0.0)


class _Model:
    """Stands for runner and sampler. During a step, its clock is already at the step's end."""

    def __init__(self, engine: MockEngine, profile: MockProfile, script: Script) -> None:
        self._engine = engine
        self._times = profile.times
        self._script = script
        self._seconds = 0.0
        self._prompts: OrderedDict[str, bytes] = OrderedDict()

    def time(self) -> float:
        return self._engine._clock.time() + self._seconds

    def end_step(self, more: float) -> float:
        """How long the step takes."""
        seconds, self._seconds = self._seconds + more, 0.0
        return seconds

    def run(self, chunks: Sequence[Chunk]) -> Any:
        """For each row of logits, the number of its chunk."""
        core = self._engine.core
        choices = core.scheduler.batch.choices
        generating = [bool(choice.generated) and len(chunk.tokens) == 1 for choice, chunk in _pairs(choices, chunks)]
        capacity = core.capacity
        self._seconds = self._times.step(chunks, generating, capacity.num_blocks * capacity.block_size)
        self._seconds += core.delays.of("step") + (0.0 if all(generating) else core.delays.of("prefill_chunk"))
        return np.array([index for index, chunk in enumerate(chunks) for _ in range(chunk.logit_rows)], dtype=np.int64)

    def sample(self, rows: Any, specs: Sequence[SampleSpec]) -> list[Sampled]:
        choices = self._engine.core.scheduler.batch.choices
        return [self._draw(choices[row].request, spec) for row, spec in zip(rows.tolist(), specs, strict=True)]

    def _draw(self, request: Request, spec: SampleSpec) -> Sampled:
        token = spec.forced
        if token is None:
            stream = spec.seed if spec.temperature else 0
            token = self._script.token(self._digest(request), spec.position, stream, spec.banned)
        return Sampled(token, *((-0.5, [(token, -0.5)]) if spec.logprobs is not None else (None, None)))

    def _digest(self, request: Request) -> bytes:
        digest = self._prompts.get(request.id)
        if digest is None:
            digest = self._prompts[request.id] = self._script.digest(request.prompt_ids)
            if len(self._prompts) > _KNOWN_PROMPTS:
                self._prompts.popitem(last=False)
        return digest


def _pairs(choices: Sequence[Any], chunks: Sequence[Chunk]) -> zip[tuple[Any, Chunk]]:
    return zip(choices, chunks, strict=True)


class _Fetches:
    """Reads of other mock engines' pages: they take time, and fail if the other one has let go."""

    def __init__(self, engine: MockEngine, profile: MockProfile, network: MockNetwork) -> None:
        self._engine = engine
        self._profile = profile
        self._network = network
        self._timers: dict[int, Timer] = {}

    def start(self, job: FetchJob) -> None:
        seconds = self._profile.times.fetch(len(job.blocks) * self._engine.ready.block_bytes)
        seconds += self._engine.core.delays.of("fetch")
        self._timers[id(job)] = self._engine._clock.call_later(seconds, lambda: self._done(job))

    def cancel(self, job: FetchJob) -> None:
        job.cancelled = True
        with contextlib.suppress(KeyError):
            self._timers.pop(id(job)).cancel()
            self._engine.post(job)

    def close(self, timeout: float) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _done(self, job: FetchJob) -> None:
        del self._timers[id(job)]
        failure = self._network.failure(job)
        if failure is None:
            job.loaded = len(job.blocks)
            job.by_path["shm"] += job.loaded
        else:
            job.failures.append(failure)
        self._engine.post(job)


class _Pages:
    """Block numbers without bytes; owners are counted as in a real pool."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._generations = [0] * num_blocks

    def bump(self, block: int) -> None:
        self._generations[block] += 1

    def generation(self, block: int) -> int:
        return self._generations[block]

    def block(self, block: int) -> memoryview:
        raise NotImplementedError("a mock engine has no bytes")

    def descriptor(self) -> SharedMemory:
        raise NotImplementedError("a mock engine has no memory to share")
