"""Engine loops on the bundled model, driven turn by turn in the caller's thread, and random requests over all options.

The golden property: what a request is answered depends on the request alone, not on who else is served, how its prompt
is cut, what is reused, or which worker goes on with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
import pytest
import torch
from golden_requests import difference, random_body

from engine import sampler
from engine.blocks import BlockPool
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.guided import GuideCompiler, backend_named
from engine.kv_pool import KvPool
from engine.loop import EngineLoop, InboxItem
from engine.messages import Failed, FromEngine, Output, Submit
from engine.model_port import Model
from engine.models.registry import Model as TorchModel
from engine.runner import Runner, load_model
from engine.sampler import sample, uniform
from engine.sequence import ModelFacts
from engine.step import Sampled, SampleSpec
from engine.vocabulary import read_vocabulary
from kvstore.handoff import Handle
from kvstore.transceivers.shm import SharedPool
from openai_api.assembly import ChoiceText
from openai_api.intake import Intake, Job, ModelLimits
from openai_api.responses import ChoiceResult, ResponseWriter, Usage
from openai_api.tokenizer import Tokenizer

TINY = "tests/models/tiny-chat"
PAGE = 8
MAX_SEQ_LEN = 160
_NOISE = 3e-5  # logits of one row differ by this much between batches
_LAST = 1 - 2.0**-53  # the largest random number
_LIMIT = 60.0  # seconds for one batch


@dataclasses.dataclass(frozen=True)
class Loaded:
    checkpoint: Checkpoint
    model: TorchModel
    guides: GuideCompiler
    tokenizer: Tokenizer
    intake: Intake


@functools.cache
def loaded(path: str = TINY, backend: str = "xgrammar") -> Loaded:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(path)
    model = load_model(EngineConfig(model=path, cpu_threads=1), checkpoint=checkpoint)
    eos = frozenset(checkpoint.eos_token_ids)
    guides = GuideCompiler(lambda: backend_named(backend, read_vocabulary(path, checkpoint.vocab_size, eos)))
    tokenizer = Tokenizer.load(path)
    limits = ModelLimits(MAX_SEQ_LEN, checkpoint.vocab_size, sorted(eos))
    return Loaded(checkpoint, model, guides, tokenizer, Intake(tokenizer, limits, "m"))


class _Guides(GuideCompiler):
    """Shared by all workers of the process, so that none may close it."""

    def __init__(self, shared: GuideCompiler) -> None:
        super().__init__(lambda: (_ for _ in ()).throw(AssertionError))
        self.compile = shared.compile  # type: ignore[method-assign]
        self.keep = shared.keep  # type: ignore[method-assign]


class Fragile:
    """The sampler, which notes draws that rounding may decide: (seed, position) of those that come out otherwise when
    the logits, or the random number, change by what another order of summation changes."""

    def __init__(self) -> None:
        self.draws: set[tuple[int, int]] = set()
        self._noise = torch.Generator().manual_seed(0)

    def __call__(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        results = sample(logits, specs)
        for shift in (-_NOISE, 0.0, 0.0, _NOISE):
            noise = torch.randn(logits.shape, generator=self._noise) * _NOISE
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    sampler, "uniform", lambda seed, at, by=shift: min(max(uniform(seed, at) + by, 0.0), _LAST)
                )
                shifted = sample(logits + noise, specs)
            for spec, found, other in zip(specs, results, shifted, strict=True):
                if found.token != other.token:
                    self.draws.add((spec.seed, spec.position))
        return results


class GoldenWorker:
    """One engine loop over its own pool of the shared model."""

    def __init__(
        self,
        name: str = "w",
        num_blocks: int = 400,
        sample: Callable[[torch.Tensor, Sequence[SampleSpec]], list[Sampled]] = sample,
        **config: Any,
    ) -> None:
        parts = loaded()
        settings: dict[str, Any] = {
            "model": TINY,
            "tokens_per_block": PAGE,
            "max_num_tokens": 512,
            "max_batch_size": 16,
            "max_seq_len": MAX_SEQ_LEN,
            "transfers": ("shm",),
            "endpoint": f"{name}:1",
        }
        self.config = msgspec.convert(settings | config, EngineConfig)
        shape = parts.checkpoint.kv_shape
        sizes = (shape.num_layers, PAGE, shape.num_kv_heads, shape.head_dim, torch.float32)
        self.incarnation = f"{name}-1"
        self.pages = SharedPool.create(num_blocks, KvPool.bytes_per_block(*sizes), self.incarnation)
        pool = KvPool(self.pages.blocks_buffer, num_blocks, *sizes)
        runner = Runner(self.config, parts.checkpoint, pool, parts.model)
        facts = ModelFacts(
            "f" * 32, parts.checkpoint.vocab_size, MAX_SEQ_LEN, frozenset(parts.checkpoint.eos_token_ids)
        )
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.outputs: dict[str, list[Output]] = {}
        self.failed: dict[str, Failed] = {}
        self._open: dict[str, int] = {}
        blocks = BlockPool(num_blocks, self.config.enable_block_reuse, self.pages.bump)
        model = Model(facts, runner, sample, pool.copy_block, _Guides(parts.guides))
        self.loop = EngineLoop(self.config, model, blocks, self.pages, None, self.incarnation, self.inbox, self._take)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.loop.close()
        self.pages.close()

    def _take(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Output):
                self.outputs[message.request_id].append(message)
                self._open[message.request_id] -= message.finish_reason is not None
            elif isinstance(message, Failed):
                self.failed[message.request_id] = message
                self._open[message.request_id] = 0

    def run(self, submits: Iterable[Submit]) -> dict[str, list[Output]]:
        """The outputs of each request, all served together; failures raise."""
        wanted = list(submits)
        for submit in wanted:
            self.outputs[submit.request_id] = []
            self._open[submit.request_id] = submit.sampling.n
            self.inbox.put(submit)
        limit = time.monotonic() + _LIMIT
        while any(self._open.values()):
            self.loop.turn()
            assert time.monotonic() < limit, repr(self.loop)
        assert not self.failed, self.failed
        return {submit.request_id: self.outputs.pop(submit.request_id) for submit in wanted}


def job_of(body: dict[str, Any]) -> Job:
    return asyncio.run(loaded().intake.completion(json.dumps(body).encode()))


def submit_of(job: Job, request_id: str, **more: Any) -> Submit:
    return Submit(request_id, job.prompt_ids, job.sampling, **more)


# ---------------------------------------------------------------------- ways to be served

Answers = dict[str, list[Output]]


def aggregated(jobs: Sequence[Job], worker: GoldenWorker, together: int) -> Answers:
    answers: Answers = {}
    for at in range(0, len(jobs), together):
        answers |= worker.run(submit_of(job, f"r{at + i}") for i, job in enumerate(jobs[at : at + together]))
    return answers


def disaggregated(jobs: Sequence[Job], context: GoldenWorker, generation: GoldenWorker, together: int) -> Answers:
    """Through the text of a handle, as between processes."""
    answers: Answers = {}
    for at in range(0, len(jobs), together):
        part = {f"r{at + i}": job for i, job in enumerate(jobs[at : at + together])}
        first = context.run(submit_of(job, name, handoff_id=int(name[1:]) + 1) for name, job in part.items())
        going_on = []
        for name, outputs in first.items():
            if (handle := outputs[-1].handle) is not None:
                going_on.append(submit_of(part[name], name, handle=Handle.decode(handle.encode())))
            else:
                answers[name] = outputs
        answers |= generation.run(going_on)
    return answers


# ---------------------------------------------------------------------- comparison


def whole(job: Job, outputs: Sequence[Output]) -> dict[str, Any]:
    """The body that a client gets, less what differs by time."""
    results, prompt = _assembled(job, outputs)
    writer = ResponseWriter(job, loaded().tokenizer)
    writer.prompt_logprobs = prompt
    choices = sorted(results.values(), key=lambda choice: choice.index)
    document: dict[str, Any] = json.loads(writer.body(choices, Usage(len(job.prompt_ids))))
    return {"choices": document["choices"]}


def _assembled(job: Job, outputs: Sequence[Output]) -> tuple[dict[int, ChoiceResult], Any]:
    texts = [ChoiceText(loaded().tokenizer, job.text) for _ in range(job.sampling.n)]
    results = {index: ChoiceResult(index) for index in range(job.sampling.n)}
    for output in outputs:
        if not texts[output.index].finished:
            results[output.index].add(texts[output.index].feed(output))
    return results, outputs[0].prompt_logprobs


def streamed(job: Job, outputs: Sequence[Output]) -> dict[str, Any]:
    """The chunks of a stream, put together as a client does."""
    texts = [ChoiceText(loaded().tokenizer, job.text) for _ in range(job.sampling.n)]
    writer = ResponseWriter(job, loaded().tokenizer)
    writer.prompt_logprobs = outputs[0].prompt_logprobs
    choices: dict[int, dict[str, Any]] = {}
    for output in outputs:
        if texts[output.index].finished:
            continue
        chunk = writer.chunk(output.index, texts[output.index].feed(output), Usage(0))
        for piece in json.loads(chunk)["choices"] if chunk is not None else ():
            known = choices.setdefault(piece["index"], piece)
            if known is not piece:
                _join(known, piece)
    return {"choices": [choices[index] for index in sorted(choices)]}


def _join(known: dict[str, Any], piece: dict[str, Any]) -> None:
    known["text"] += piece["text"]
    known["token_ids"] += piece["token_ids"]
    known["finish_reason"], known["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    if known["logprobs"] is not None:
        for name, values in piece["logprobs"].items():
            known["logprobs"][name] += values


def is_tie(job: Job, left: Sequence[Output], right: Sequence[Output]) -> bool:
    """Every choice whose tokens differ first does so at a draw that rounding decides: the request is served again to
    find these."""
    differing = []
    for index in range(job.sampling.n):
        ours, theirs = (
            [token for output in outputs if output.index == index for token in output.token_ids]
            for outputs in (left, right)
        )
        if ours != theirs:
            first = next(
                (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours)
            )
            differing.append((((job.sampling.seed + index) % 2**63), first))
    noted = Fragile()
    with GoldenWorker("again", sample=noted, enable_block_reuse=False) as worker:
        aggregated([job], worker, 1)
    return bool(differing) and noted.draws.issuperset(differing)


def check(count: int, seed: int) -> tuple[dict[str, list[str]], int]:
    """Differences of each way from a request's being served alone, by way: empty where the property holds. And how many
    differences were left out since a draw fell within rounding of the border between two tokens."""
    rng = random.Random(seed)
    bodies = [random_body(rng) for _ in range(count)]
    jobs = [job_of(body) for body in bodies]
    with GoldenWorker("alone", enable_block_reuse=False) as worker:
        alone = aggregated(jobs, worker, 1)
    expected = {name: whole(jobs[int(name[1:])], outputs) for name, outputs in alone.items()}
    ways: dict[str, Answers] = {}
    with GoldenWorker("batched", enable_block_reuse=False) as worker:
        ways["batched"] = aggregated(jobs, worker, 24)
    with GoldenWorker("chunked", enable_block_reuse=False, max_num_tokens=19) as worker:
        ways["chunked"] = aggregated(jobs, worker, 24)
    with GoldenWorker("reuse", num_blocks=150) as worker:
        ways["reuse"] = aggregated(jobs, worker, 6)
    pressed: dict[str, Any] = {"num_blocks": 40, "max_batch_size": 32, "capacity_policy": "MAX_UTILIZATION"}
    with GoldenWorker("preempted", **pressed) as worker:
        ways["preempted"] = aggregated(jobs, worker, 40)
        assert count < 40 or worker.loop.scheduler.preemptions, "the pool is too large for this to test anything"
    with GoldenWorker("context") as context, GoldenWorker("generation") as generation:
        ways["hand-off"] = disaggregated(jobs, context, generation, 12)
    with GoldenWorker("context") as context, GoldenWorker("unreached", transfers=()) as generation:
        ways["recomputed"] = disaggregated(jobs, context, generation, 12)
    found: dict[str, list[str]] = {way: [] for way in (*ways, "streamed")}
    ties = 0
    for name, outputs in alone.items():
        job = jobs[int(name[1:])]
        for way, answers in ways.items():
            text = difference(expected[name], whole(job, answers[name]))
            if text is not None and is_tie(job, outputs, answers[name]):
                ties += 1
            elif text is not None:
                found[way].append(f"{bodies[int(name[1:])]}: {text}")
        if text := difference(expected[name], streamed(job, outputs)):
            found["streamed"].append(f"{bodies[int(name[1:])]}: {text}")
    return found, ties
