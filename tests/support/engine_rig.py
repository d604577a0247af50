"""An engine loop whose model is a hash of all that its KV blocks hold: one wrong block changes everything after it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

import msgspec
import numpy as np

from engine.blocks import BlockPool
from engine.config import EngineConfig, PoolConfig
from engine.host_tier import host_buffer
from engine.loop import EngineLoop, InboxItem
from engine.messages import (
    Abort,
    Events,
    Failed,
    Feed,
    FromEngine,
    HandoffFetched,
    Output,
    ReleaseHandoff,
    SamplingParams,
    SetDelays,
    Shutdown,
    Stats,
    Submit,
)
from engine.model_port import Model
from engine.sequence import ModelFacts
from engine.step import Chunk, Sampled, SampleSpec
from kvstore.handoff import Handle
from kvstore.transceivers.base import BlockStore
from kvstore.transceivers.shm import SharedPool

BLOCK = 4
VOCAB = 97
EOS = 2
MAX_SEQ_LEN = 128
FINGERPRINT = "f" * 32
DEADLINE = 20.0


def state_of(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(array("q", tokens).tobytes(), digest_size=8).digest(), "little")


def draw(state: int, spec: SampleSpec) -> Sampled:
    salt = (spec.seed, spec.position) if spec.temperature else (0, 0)
    for attempt in itertools.count():
        token = state_of([state & (2**62 - 1), *salt, attempt]) % VOCAB
        if token not in spec.banned:
            logprob = -(state % 997) / 100 if spec.logprobs is not None else None
            return Sampled(token, logprob, [(token, logprob)] if logprob is not None else None)
    raise AssertionError


class HashRunner:
    """The KV of a token is the token: 8 bytes a position."""

    def __init__(self, pages: SharedPool) -> None:
        self._pages = pages
        self.steps: list[list[Chunk]] = []
        self.on_step: Callable[[Sequence[Chunk]], None] = lambda chunks: None

    def run(self, chunks: Sequence[Chunk]) -> Any:
        self.on_step(chunks)
        self.steps.append([Chunk(list(c.tokens), c.start, list(c.block_table), c.wants_logits) for c in chunks])
        written: set[int] = set()
        for chunk in chunks:
            touched = set(chunk.block_table[chunk.start // BLOCK : (chunk.start + len(chunk.tokens) - 1) // BLOCK + 1])
            assert not touched & written, "two chunks write to one block"
            written |= touched
            for position, token in enumerate(chunk.tokens, chunk.start):
                self._cells(chunk.block_table[position // BLOCK])[position % BLOCK] = token
        wanted = [state_of(self._read(chunk)) for chunk in chunks if chunk.wants_logits]
        return np.array(wanted, dtype=np.uint64)

    def copy_block(self, source: int, target: int) -> None:
        self._pages.block(target)[:] = self._pages.block(source)

    def _cells(self, block: int) -> memoryview:
        return self._pages.block(block).cast("q")

    def _read(self, chunk: Chunk) -> list[int]:
        length = chunk.start + len(chunk.tokens)
        cells = [cell for block in chunk.block_table for cell in self._cells(block)]
        return cells[:length]


def sample(states: Any, specs: Sequence[SampleSpec]) -> list[Sampled]:
    assert len(states) == len(specs)
    return [draw(int(state), spec) for state, spec in zip(states, specs, strict=True)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


def expected(prompt: Sequence[int], sampling: SamplingParams) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of each choice, computed without blocks, batches or hand-offs."""
    answers = []
    stops = set(sampling.stop_token_ids)
    eos = set() if sampling.ignore_eos else {EOS}
    limit = min(sampling.max_tokens, MAX_SEQ_LEN - len(prompt))
    for index in range(sampling.n):
        tokens: list[int] = []
        reason = "length"
        while len(tokens) < limit and reason == "length":
            spec = SampleSpec(
                temperature=sampling.temperature,
                seed=(sampling.seed + index) % 2**63,
                position=len(tokens),
                banned=tuple(stops | eos) if len(tokens) < sampling.min_tokens else (),
            )
            tokens.append(draw(state_of([*prompt, *tokens]), spec).token)
            if tokens[-1] in stops | eos:
                reason = "stop"
        answers.append((tokens, reason))
    return answers


@dataclass
class Result:
    outputs: list[Output] = field(default_factory=list)
    error: Failed | None = None

    def choices(self) -> list[tuple[list[int], str]]:
        indexes = sorted({output.index for output in self.outputs})
        return [self._choice(index) for index in indexes]

    def _choice(self, index: int) -> tuple[list[int], str]:
        mine = [output for output in self.outputs if output.index == index]
        reasons = [output.finish_reason for output in mine if output.finish_reason is not None]
        assert len(reasons) == 1 and mine[-1].finish_reason is not None, "one finish reason, in the last output"
        return [token for output in mine for token in output.token_ids], reasons[0]

    @property
    def cached_tokens(self) -> int:
        told = [output.cached_tokens for output in self.outputs if output.cached_tokens is not None]
        assert len(told) == 1 and self.outputs[0].cached_tokens is not None and self.outputs[0].timing is not None
        return told[0]

    @property
    def handle(self) -> Handle:
        handle = self.outputs[-1].handle
        assert handle is not None
        return Handle.decode(handle.encode())


class Worker:
    """One engine loop on a thread of its own. Leaving the context ends it."""

    def __init__(self, name: str = "w", num_blocks: int = 32, store: BlockStore | None = None, **config: Any) -> None:
        pool = config.pop("pool", PoolConfig(pool="none:1", get_timeout=0.3) if store is not None else None)
        settings = {
            "model": "hash",
            "tokens_per_block": BLOCK,
            "max_num_tokens": 16,
            "max_batch_size": 8,
            "fault_injection": True,
            "endpoint": f"{name}:1",
            "pool": pool,
        } | config
        self.config = msgspec.convert(settings, EngineConfig)
        self.incarnation = f"{name}-incarnation"
        self.pages = SharedPool.create(num_blocks, BLOCK * 8, self.incarnation)
        host = host_buffer(self.config.host_cache_size, BLOCK * 8, self.pages.block)
        self.blocks = BlockPool(num_blocks, self.config.enable_block_reuse, self.pages.bump, host)
        self.runner = HashRunner(self.pages)
        self.facts = ModelFacts(FINGERPRINT, VOCAB, MAX_SEQ_LEN, frozenset({EOS}))
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.stats = Stats()
        self.fetched: list[HandoffFetched] = []
        self.events: list[Events] = []
        self.feeds: list[Feed] = []
        self._results: dict[str, Result] = {}
        self._unfinished: dict[str, int] = {}
        self._changed = threading.Condition()
        self._ids = itertools.count()
        model = Model(self.facts, self.runner, sample, self.runner.copy_block)
        self.loop = EngineLoop(
            self.config, model, self.blocks, self.pages, store, self.incarnation, self.inbox, self._take
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.inbox.put(Shutdown())
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self.pages.close()
        if self._error is not None and exc_info[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
        self.loop.close()

    def _take(self, messages: list[FromEngine]) -> None:
        with self._changed:
            for message in messages:
                match message:
                    case Output():
                        self._results[message.request_id].outputs.append(message)
                        self._unfinished[message.request_id] -= message.finish_reason is not None
                    case Failed():
                        self._results[message.request_id].error = message
                        self._unfinished[message.request_id] = 0
                    case Stats():
                        self.stats = message
                    case HandoffFetched():
                        self.fetched.append(message)
                    case Events():
                        self.events.append(message)
                    case Feed():
                        self.feeds.append(message)
            self._changed.notify_all()

    # ------------------------------------------------------------ what tests do

    def wait(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + DEADLINE
        with self._changed:
            while not condition():
                if self._error is not None:
                    raise self._error
                left = limit - time.monotonic()
                assert left > 0, f"{self.loop!r} {self.stats}"
                self._changed.wait(min(left, 0.01))

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **more: Any) -> str:
        request_id = f"r{next(self._ids)}"
        self._results[request_id] = Result()
        self._unfinished[request_id] = sampling.n
        self.inbox.put(Submit(request_id, list(prompt), sampling, **more))
        return request_id

    def result(self, request_id: str) -> Result:
        self.wait(lambda: self._unfinished[request_id] == 0)
        return self._results[request_id]

    def seen(self, request_id: str) -> Result:
        """What has come so far."""
        return self._results[request_id]

    def ask(self, prompt: Sequence[int], sampling: SamplingParams, **more: Any) -> Result:
        return self.result(self.submit(prompt, sampling, **more))

    def abort(self, request_id: str) -> None:
        self.inbox.put(Abort(request_id))

    def release(self, handoff_id: int, incarnation: str | None = None) -> None:
        self.inbox.put(ReleaseHandoff(handoff_id, incarnation))

    def delay(self, **seconds: float) -> None:
        self.inbox.put(SetDelays(seconds))

    def wait_baseline(self, pinned: int = 0) -> None:
        """Nobody holds a block, and the counters say so."""

        def there() -> bool:
            stats = self.stats
            requests = stats.requests_running + stats.requests_waiting + stats.requests_fetching
            return stats.blocks_used == requests == 0 and stats.blocks_pinned == pinned

        self.wait(there)
        stats = self.stats
        if stats.blocks_total:
            total = stats.blocks_used + stats.blocks_pinned + stats.blocks_reusable + stats.blocks_free
            assert total == stats.blocks_total
        assert self.blocks.reserved == 0 and self.loop.scheduler._places == 0


class MemoryStore:
    """A BlockStore in this process, with faults."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.up = True
        self.lost: set[bytes] = set()  # known to `contains`, and not to `get`
        self.corrupt: set[bytes] = set()  # `get` finds out while it writes to the buffer
        self.slow = 0.0
        self.refuses_puts = False
        self.calls: list[str] = []

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        self.calls.append("contains")
        return self._leading(keys, self.values) if self.up else 0

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        self.calls.append("get")
        if self.slow:
            time.sleep(min(self.slow, timeout))
        if not self.up or self.slow > timeout:
            return 0
        for index, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key in self.corrupt:
                buffer[:] = b"\xff" * len(buffer)
            if key not in self.values or key in self.lost | self.corrupt:
                return index
            buffer[:] = self.values[key]
        return len(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        self.calls.append("put")
        if not self.up or self.refuses_puts:
            return 0
        for key, block in zip(keys, blocks, strict=True):
            self.values.setdefault(key, bytes(block))
        return len(keys)

    def state(self) -> str:
        return "up" if self.up else "degraded: down"

    def close(self) -> None:
        pass

    @staticmethod
    def _leading(keys: Sequence[bytes], there: dict[bytes, bytes]) -> int:
        return next((index for index, key in enumerate(keys) if key not in there), len(keys))
