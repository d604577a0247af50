"""Bias, penalties, bans, masks and min_p, each against transformers' processor for it (C033, C034, C073)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.guided import without, words_of
from engine.logits import shaped
from engine.penalties import BadWords, TokenCounts
from engine.sampler import sample
from engine.step import SampleSpec, Shaping

VOCAB = 61


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def counts_of(prompt: list[int], generated: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token in generated:
        counts.add(token)
    return counts


def processors() -> Any:
    return pytest.importorskip("transformers.generation.logits_process")


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


# ---------------------------------------------------------------- penalties


@settings(deadline=None, max_examples=60)
@given(prompt=tokens, generated=tokens, penalty=st.sampled_from([0.5, 1.0, 1.2, 2.0]), seed=st.integers(0, 999))
def test_repetition_sees_prompt_and_answer(prompt: list[int], generated: list[int], penalty: float, seed: int) -> None:
    logits = logits_of(seed)
    spec = SampleSpec(shaping=Shaping(counts=counts_of(prompt, generated), repetition=penalty))
    theirs = processors().RepetitionPenaltyLogitsProcessor(penalty)
    ids = torch.tensor([prompt + generated], dtype=torch.int64)
    torch.testing.assert_close(shaped(logits, [spec]), theirs(ids, logits.clone()))


@settings(deadline=None, max_examples=60)
@given(prompt=tokens, generated=tokens, seed=st.integers(0, 999))
def test_presence_and_frequency_see_the_answer_only(prompt: list[int], generated: list[int], seed: int) -> None:
    """OpenAI's formula; transformers has no processor for it."""
    logits = logits_of(seed)
    spec = SampleSpec(shaping=Shaping(counts=counts_of(prompt, generated), presence=0.75, frequency=-0.25))
    expected = logits.clone()
    for token in range(VOCAB):
        count = generated.count(token)
        expected[0, token] -= 0.75 * (count > 0) - 0.25 * count
    torch.testing.assert_close(shaped(logits, [spec]), expected)


def test_a_token_of_the_prompt_alone() -> None:
    """C033: frequency leaves it as it is, repetition changes it in the first step."""
    logits = torch.full((1, 5), 1.0)
    by_frequency = Shaping(counts=counts_of([3], []), frequency=2.0, presence=2.0)
    by_repetition = Shaping(counts=counts_of([3], []), repetition=2.0)
    assert shaped(logits, [SampleSpec(shaping=by_frequency)])[0].tolist() == [1, 1, 1, 1, 1]
    assert shaped(logits, [SampleSpec(shaping=by_repetition)])[0].tolist() == [1, 1, 1, 0.5, 1]


def test_repetition_comes_before_presence_and_after_bias() -> None:
    shaping = Shaping(
        bias=(np.array([1]), np.array([3.0], np.float32)),
        counts=counts_of([], [1, 1]),
        repetition=2.0,
        presence=0.5,
        frequency=0.25,
    )
    assert shaped(torch.tensor([[0.0, 1.0]]), [SampleSpec(shaping=shaping)])[0, 1] == (1 + 3) / 2 - 0.5 - 2 * 0.25


def test_counts_grow_beyond_their_room() -> None:
    counts = counts_of(list(range(10)), [token % 700 for token in range(1400)])
    assert len(counts) == 700
    assert sorted(counts.ids.tolist()) == list(range(700))
    assert counts.generated.tolist() == [2.0] * 700


# ---------------------------------------------------------------- bias, bans, masks


@settings(deadline=None, max_examples=40)
@given(bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1, max_size=8))
def test_bias_is_added(bias: dict[int, float]) -> None:
    logits = logits_of(3)
    shaping = Shaping(bias=(np.array([*bias]), np.array([*bias.values()], np.float32)))
    theirs = processors().SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = theirs(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(shaped(logits, [SampleSpec(shaping=shaping)]), expected)


@settings(deadline=None, max_examples=60)
@given(words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4), said=tokens)
def test_bad_words(words: list[list[int]], said: list[int]) -> None:
    said = [token % 4 for token in said]
    banned = BadWords(words).banned(said, 0)
    theirs = processors().NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([60]))
    expected = theirs(torch.tensor([said or [50]]), torch.zeros(1, VOCAB))
    assert set(banned) == set((expected[0] == -math.inf).nonzero().flatten().tolist())


def test_bad_words_do_not_look_into_the_prompt() -> None:
    words = BadWords([[5, 6, 7]])
    assert words.banned([5, 6], prompt_tokens=2) == ()
    assert words.banned([5, 5, 6], prompt_tokens=2) == ()
    assert words.banned([5, 5, 6], prompt_tokens=1) == (7,)


@settings(deadline=None, max_examples=60)
@given(allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1), vocab=st.integers(VOCAB, 130))
def test_masks_leave_exactly_their_tokens(allowed: set[int], vocab: int) -> None:
    """Also where the logits are wider than the mask, and where the mask ends inside a word."""
    mask = words_of(sorted(allowed), VOCAB)
    logits = logits_of(1, rows=2, vocab=vocab)
    for specs in ([SampleSpec(shaping=Shaping(mask=mask))] * 2, [SampleSpec(), SampleSpec(shaping=Shaping(mask=mask))]):
        result = shaped(logits, specs)
        finite = set(result[1].isfinite().nonzero().flatten().tolist())
        assert finite == allowed
        assert torch.equal(result[1][sorted(allowed)], logits[1][sorted(allowed)])
    assert torch.equal(result[0], logits[0])


def test_bans_give_way_to_a_grammar_that_leaves_nothing_else() -> None:
    mask = words_of([2, 40], 64)
    assert without(mask, (2,)).tolist() == words_of([40], 64).tolist()
    assert without(mask, (2, 40)).tolist() == mask.tolist()
    assert without(mask, ()) is mask


def test_nothing_asked_for_is_nothing_done() -> None:
    logits = logits_of(4, rows=3)
    assert shaped(logits, [SampleSpec(), SampleSpec(temperature=0), SampleSpec(top_k=3)]) is logits


# ---------------------------------------------------------------- min_p


@settings(deadline=None, max_examples=80)
@given(min_p=st.floats(0, 1), temperature=st.sampled_from([0.3, 1.0, 2.0]), seed=st.integers(0, 500))
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float, seed: int) -> None:
    logits = logits_of(seed)
    kept = processors().MinPLogitsWarper(min_p)(torch.zeros(1, 1, dtype=torch.int64), logits / temperature)
    allowed = set(kept[0].isfinite().nonzero().flatten().tolist())
    specs = [SampleSpec(temperature=temperature, min_p=min_p, seed=1, position=at) for at in range(100)]
    assert {drawn.token for drawn in sample(logits.expand(100, -1), specs)} <= allowed


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (12, 1.0), (0, 0.8), (12, 0.8)])
def test_all_cuts_together(top_k: int, top_p: float) -> None:
    """top_k, then top_p of what is left, then min_p, as transformers' warpers in that order."""
    names = processors()
    logits = logits_of(11)
    none = torch.zeros(1, 1, dtype=torch.int64)
    expected = logits
    if top_k:
        expected = names.TopKLogitsWarper(top_k)(none, expected)
    if top_p < 1:
        expected = names.TopPLogitsWarper(top_p)(none, expected)
    expected = names.MinPLogitsWarper(0.05)(none, expected)
    specs = [SampleSpec(top_k=top_k, top_p=top_p, min_p=0.05, seed=2, position=at) for at in range(4000)]
    found = {drawn.token for drawn in sample(logits.expand(4000, -1), specs)}
    assert found == set(expected[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("top_k", [200, 5000])
def test_top_p_is_a_share_of_what_a_large_top_k_leaves(top_k: int) -> None:
    """More tokens than are ranked at first: half of the first `top_k` equally likely ones stay."""
    logits = torch.zeros(1, 20_000)
    specs = [SampleSpec(top_k=top_k, top_p=0.5, seed=3, position=at) for at in range(300)]
    assert max(drawn.token for drawn in sample(logits.expand(300, -1), specs)) < top_k / 2


# ---------------------------------------------------------------- log-probabilities


def test_processed_logprobs_show_the_shaping() -> None:
    shaping = Shaping(counts=counts_of([], [4, 4]), frequency=1.5)
    logits = logits_of(5)
    raw, processed = (
        sample(logits, [SampleSpec(temperature=0, shaping=shaping, logprobs=VOCAB, processed_logprobs=mode)])[0]
        for mode in (False, True)
    )
    expected = logits.clone()
    expected[0, 4] -= 3
    for found, of in ((raw, logits), (processed, expected)):
        assert found.top is not None
        reference = of[0].log_softmax(-1)
        assert all(value == pytest.approx(float(reference[token]), abs=1e-5) for token, value in found.top)


def test_forced_tokens_are_scored_and_not_drawn() -> None:
    logits = logits_of(6, rows=2)
    first, second = sample(logits, [SampleSpec(forced=17, logprobs=2), SampleSpec(temperature=0)])
    assert first.token == 17
    assert first.logprob == pytest.approx(float(logits[0].log_softmax(-1)[17]))
    assert first.top is not None and len(first.top) == 2
    assert second.token == int(logits[1].argmax()) and second.logprob is None


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_shaped_rows_do_not_depend_on_their_batch(data: st.DataObject, seed: int) -> None:
    def one(index: int) -> SampleSpec:
        said = data.draw(tokens, label=f"said {index}")
        shaping = Shaping(counts=counts_of(said[:4], said[4:]), repetition=1.3, presence=0.2, frequency=0.1)
        asked = data.draw(st.booleans())
        return SampleSpec(seed=index, min_p=0.01, shaping=shaping if asked else None, banned=(1, 5), logprobs=3)

    specs = [one(index) for index in range(4)]
    logits = logits_of(seed, rows=4)
    assert sample(logits, specs) == [sample(logits[row : row + 1], [spec])[0] for row, spec in enumerate(specs)]
