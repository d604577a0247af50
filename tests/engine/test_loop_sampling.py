"""Sampling options through the engine loop on the bundled model: what fails alone, what crosses a hand-off, what waits
for its grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from golden_rig import PAGE, GoldenWorker, loaded
from model_rig import load_rig

from engine.guided import GuideCompiler, GuideError
from engine.messages import Abort, GuidedDecoding, Output, SamplingParams, Submit
from engine.step import Chunk
from kvstore.handoff import Handle

PROMPT = list(range(30, 30 + 2 * PAGE + 3))


@pytest.fixture
def worker() -> Iterator[GoldenWorker]:
    with GoldenWorker() as made:
        yield made


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | fields))


def ask(worker: GoldenWorker, sampling: SamplingParams, prompt: Sequence[int] = PROMPT, **more: Any) -> list[Output]:
    return worker.run([Submit("r", list(prompt), sampling, **more)])["r"]


def tokens_of(outputs: Sequence[Output], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def assert_free(worker: GoldenWorker) -> None:
    """Nothing is held once everything has ended."""
    blocks = worker.loop.scheduler.blocks
    assert (blocks.used, blocks.pinned, blocks.reserved) == (0, 0, 0)


def failure(worker: GoldenWorker, submit: Submit, limit: int = 200) -> Any:
    """The Failed of a request that must not succeed."""
    worker.outputs[submit.request_id] = []
    worker._open[submit.request_id] = submit.sampling.n
    worker.inbox.put(submit)
    for _ in range(limit):
        if submit.request_id in worker.failed:
            return worker.failed.pop(submit.request_id)
        worker.loop.turn()
    raise AssertionError("it did not fail")


# ---------------------------------------------------------------- rows without a distribution


class Poisoned:
    """A runner that gives NaN for one request's rows, known by a token of its prompt."""

    def __init__(self, inner: Any, token: int) -> None:
        self._inner, self._token = inner, token
        self._tables: set[int] = set()

    def run(self, chunks: Sequence[Chunk]) -> Any:
        logits = self._inner.run(chunks).clone()
        row = 0
        for chunk in chunks:
            if self._token in chunk.tokens:
                self._tables.add(chunk.block_table[0])
            row += chunk.logit_rows
            if chunk.logit_rows and chunk.block_table[0] in self._tables:
                logits[row - chunk.logit_rows : row] = torch.nan
        return logits


def test_nan_fails_the_request_that_has_it_and_no_other(worker: GoldenWorker) -> None:
    others = [Submit(f"r{i}", [40 + i, *PROMPT], params(n=2, temperature=1.0, seed=i)) for i in range(3)]
    expected = worker.run(others)
    model = worker.loop._model
    worker.loop._model = type(model)(
        model.facts, Poisoned(model.runner, 999), model.sample, model.copy_block, model.guides
    )
    bad = Submit("bad", [999, *PROMPT], params(n=3))
    worker.outputs["bad"] = []
    worker._open["bad"] = 3
    worker.inbox.put(bad)
    for submit in others:
        worker.outputs[submit.request_id] = []
        worker._open[submit.request_id] = 2
        worker.inbox.put(submit)
    while any(worker._open.values()):
        worker.loop.turn()
    assert worker.failed["bad"].code == "internal_error"
    assert "NaN" in worker.failed["bad"].message
    for submit in others:
        found = worker.outputs[submit.request_id]
        for index in range(2):
            assert tokens_of(found, index) == tokens_of(expected[submit.request_id], index)
    assert_free(worker)


# ---------------------------------------------------------------- log-probabilities of the prompt


def test_prompt_logprobs_are_the_models(worker: GoldenWorker) -> None:
    rig = load_rig("tests/models/tiny-chat")
    runner = rig.runner()
    chunk = Chunk(PROMPT, 0, list(range(4)), wants_logits=True, wants_all=True)
    reference = runner.run([chunk]).log_softmax(-1)
    assert reference.shape[0] == len(PROMPT)
    for _ in range(2):  # also when all blocks of the prompt are in the cache
        first = ask(worker, params(prompt_logprobs=2))[0]
        assert first.cached_tokens == 0
        assert first.prompt_logprobs is not None
        assert [entry.token_id for entry in first.prompt_logprobs] == PROMPT[1:]
        for row, entry in enumerate(first.prompt_logprobs):
            assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-4)
            assert entry.top[0][0] == int(reference[row].argmax())
            assert len(entry.top) == 2
    assert (ask(worker, params())[0].cached_tokens or 0) > 0


def test_prompt_logprobs_cross_a_hand_off(worker: GoldenWorker) -> None:
    sampling = params(prompt_logprobs=1, logprobs=1)
    expected = ask(worker, sampling)
    with GoldenWorker("context") as context, GoldenWorker("generation") as generation:
        outputs = ask(context, sampling, handoff_id=1)
        assert outputs[-1].handle is not None
        found = ask(generation, sampling, handle=Handle.decode(outputs[-1].handle.encode()))
    assert found[0].prompt_logprobs == expected[0].prompt_logprobs
    assert tokens_of(found) == tokens_of(expected)


def test_a_prompt_of_one_token_has_no_logprobs(worker: GoldenWorker) -> None:
    assert ask(worker, params(prompt_logprobs=1), prompt=[7])[0].prompt_logprobs == []


# ---------------------------------------------------------------- seeds, penalties, bias


def test_choices_have_seeds_of_their_own(worker: GoldenWorker) -> None:
    """C032, C072: choice k draws as a request with seed + k does."""
    together = ask(worker, params(12, n=4, temperature=1.5, seed=2**63 - 2))
    alone = [ask(worker, params(12, temperature=1.5, seed=(2**63 - 2 + k) % 2**63)) for k in range(4)]
    answers = [tokens_of(together, k) for k in range(4)]
    assert answers == [tokens_of(outputs) for outputs in alone]
    assert len(set(map(tuple, answers))) > 1


def test_a_token_is_never_said_twice_under_a_high_penalty(worker: GoldenWorker) -> None:
    plain = tokens_of(ask(worker, params(24, ignore_eos=True, frequency_penalty=-2.0, presence_penalty=-100.0)))
    penalised = tokens_of(ask(worker, params(24, ignore_eos=True, presence_penalty=1000.0)))
    assert len(set(penalised)) == 24
    assert len(set(plain)) == 1


def test_bias_decides(worker: GoldenWorker) -> None:
    assert tokens_of(ask(worker, params(3, logit_bias={77: 1000.0}))) == [77, 77, 77]
    assert tokens_of(ask(worker, params(3, logit_bias={77: 1000.0}, bad_words=[[77, 77]])))[:1] == [77]
    assert tokens_of(ask(worker, params(3, logit_bias={77: 1000.0}, bad_words=[[77, 77]])))[1] != 77


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {5000: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"bad_words": [[1, 5000]]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary(worker: GoldenWorker, fields: dict[str, Any], param: str) -> None:
    failed = failure(worker, Submit("r", PROMPT, params(**fields)))
    assert (failed.code, failed.param) == ("invalid_request_error", param)


# ---------------------------------------------------------------- guided


def guided(kind: str, text: str) -> GuidedDecoding:
    return GuidedDecoding(kind, text)


ONE_TOKEN = guided("ebnf", 'root ::= "a"')


def test_guided_answers_match_for_every_choice(worker: GoldenWorker) -> None:
    sampling = params(40, guided=guided("regex", "(yes|no){3}"), n=3, temperature=1.5, seed=1)
    outputs = ask(worker, sampling)
    for index in range(3):
        text = loaded().tokenizer.decode(tokens_of(outputs, index))
        assert text.replace("yes", "n").replace("no", "n") == "nnn"
    assert {output.finish_reason for output in outputs if output.finish_reason} == {"stop"}
    assert_free(worker)


def test_min_tokens_gives_way_to_the_grammar(worker: GoldenWorker) -> None:
    outputs = ask(worker, params(10, guided=guided("regex", "ab"), min_tokens=9))
    assert loaded().tokenizer.decode(tokens_of(outputs)) == "ab"


def test_a_finished_grammar_ends_the_answer_at_the_hand_off(worker: GoldenWorker) -> None:
    """C074: a grammar of one token is complete with the context worker's token."""
    outputs = ask(worker, params(10, guided=ONE_TOKEN), handoff_id=9)
    assert [(output.finish_reason, output.handle) for output in outputs] == [("stop", None)]
    assert_free(worker)


def test_the_grammar_goes_on_after_the_first_token() -> None:
    sampling = params(30, guided=guided("json_schema", json.dumps({"type": "object"})), temperature=1.0)
    with GoldenWorker("c") as context, GoldenWorker("g") as generation:
        for seed in range(5):
            seeded = msgspec.structs.replace(sampling, seed=seed)
            handle = ask(context, seeded, handoff_id=seed + 1)[-1].handle
            assert handle is not None
            text = loaded().tokenizer.decode(tokens_of(ask(generation, seeded, handle=handle)))
            assert text.startswith("{") and not text.startswith("{{")


def test_a_first_token_that_the_grammar_refuses() -> None:
    """The other worker's grammar was another one: an error, not an answer that breaks the format."""
    with GoldenWorker("c") as context, GoldenWorker("g") as generation:
        handle = ask(context, params(8, logit_bias={77: 1000.0}), handoff_id=1)[-1].handle
        submit = Submit("r", PROMPT, params(8, guided=guided("regex", "yes")), handle=handle)
        assert failure(generation, submit).code == "handoff_refused"
        assert_free(generation)


def test_what_does_not_compile_is_refused_before_it_is_queued(worker: GoldenWorker) -> None:
    failed = failure(worker, Submit("r", PROMPT, params(guided=guided("regex", "a("))))
    assert (failed.code, failed.param) == ("invalid_request_error", "response_format")
    assert worker.loop.stats.steps == 0
    assert_free(worker)
    assert tokens_of(ask(worker, params(2)))


def test_a_worker_without_a_backend_refuses(worker: GoldenWorker) -> None:
    """C051: never prose instead."""
    worker.loop.reception.guides = None
    failed = failure(worker, Submit("r", PROMPT, params(guided=ONE_TOKEN)))
    assert (failed.code, failed.param) == ("invalid_request_error", "response_format")


class Held(GuideCompiler):
    """Compiles nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: (_ for _ in ()).throw(GuideError("none")))
        self.jobs: list[tuple[Any, ...]] = []

    def compile(self, *job: Any) -> None:
        self.jobs.append(job)

    def finish(self) -> None:
        for request_id, wanted, _ in self.jobs:
            loaded().guides.compile(request_id, wanted, self.jobs[0][2])


def test_others_are_served_while_a_grammar_compiles_and_an_abort_is_heard(worker: GoldenWorker) -> None:
    held = Held()
    worker.loop.reception.guides = held
    worker.outputs["slow"] = []
    worker._open["slow"] = 0
    worker.inbox.put(Submit("slow", PROMPT, params(guided=ONE_TOKEN)))
    assert len(tokens_of(ask(worker, params(4, ignore_eos=True)))) == 4
    assert [job[0] for job in held.jobs] == ["slow"]
    worker.inbox.put(Abort("slow"))
    worker.loop.turn()
    held.finish()  # the result comes for a request that is gone
    assert len(tokens_of(ask(worker, params(4, ignore_eos=True)))) == 4
    assert worker.outputs["slow"] == []
    assert_free(worker)
