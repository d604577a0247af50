"""The sampler against a plain reading of its rules, and the purity that hand-offs rely on."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.sampler import sample, uniform
from engine.step import BadLogits, SampleSpec

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0, -torch.inf, 1.5, 1.0]])


def draws(logits: torch.Tensor, spec: SampleSpec, count: int) -> Counter[int]:
    """Tokens of `count` positions of one seed."""
    specs = [
        SampleSpec(spec.temperature, spec.top_p, spec.top_k, spec.seed, position, spec.banned)
        for position in range(count)
    ]
    return Counter(result.token for result in sample(logits.expand(count, -1), specs))


def by_the_rules(logits: list[float], spec: SampleSpec) -> int:
    """The documented procedure on Python floats, one row, every step spelled out."""
    allowed = [-math.inf if token in spec.banned else value for token, value in enumerate(logits)]
    order = sorted(range(len(allowed)), key=lambda token: (-allowed[token], token))
    if spec.temperature == 0:
        return order[0]
    best = allowed[order[0]]
    if not spec.top_k and spec.top_p == 1:
        order = list(range(len(allowed)))
    order = order[: spec.top_k] if spec.top_k else order
    weights = [math.exp((allowed[token] - best) / spec.temperature) for token in order]
    reaching = [mass >= spec.top_p * math.fsum(weights) for mass in accumulate(weights)]
    kept = reaching.index(True) + 1 if True in reaching else len(weights)
    limit, reached = uniform(spec.seed, spec.position) * math.fsum(weights[:kept]), 0.0
    for token, weight in zip(order[:kept], weights, strict=False):
        reached += weight
        if reached > limit:
            return token
    return order[kept - 1]


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert sample(LOGITS, [SampleSpec(temperature=0)])[0].token == 1


def test_greedy_ignores_the_cuts() -> None:
    assert sample(LOGITS, [SampleSpec(temperature=0, top_p=0.01, top_k=1, seed=9)])[0].token == 1


def test_banned_tokens_are_never_drawn() -> None:
    assert sample(LOGITS, [SampleSpec(temperature=0, banned=(1, 3))])[0].token == 6
    assert not {1, 3} & set(draws(LOGITS, SampleSpec(banned=(1, 3)), 500))


def test_ids_beyond_the_vocabulary_ban_nothing() -> None:
    assert sample(LOGITS, [SampleSpec(temperature=0, banned=(8, 99999, -1))])[0].token == 1


def test_banning_leaves_the_given_logits_alone() -> None:
    logits = LOGITS.clone()
    sample(logits, [SampleSpec(banned=(1,))])
    assert torch.equal(logits, LOGITS)


# ---------------------------------------------------------------- the distribution


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    count = 20_000
    found = draws(LOGITS, SampleSpec(temperature=temperature, seed=3), count)
    for token, probability in enumerate((LOGITS[0].double() / temperature).softmax(-1).tolist()):
        spread = math.sqrt(probability * (1 - probability) / count)
        assert abs(found[token] / count - probability) <= 5 * spread


def test_top_k_keeps_the_best_and_breaks_ties_by_id() -> None:
    assert set(draws(LOGITS, SampleSpec(top_k=3), 2000)) == {1, 3, 6}
    assert set(draws(LOGITS, SampleSpec(top_k=1), 50)) == {1}
    assert set(draws(LOGITS, SampleSpec(top_k=100), 5000)) == {0, 1, 2, 3, 4, 6, 7}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert set(draws(logits, SampleSpec(top_p=0.5), 500)) == {0}
    assert set(draws(logits, SampleSpec(top_p=0.51), 500)) == {0, 1}
    assert set(draws(logits, SampleSpec(top_p=0.9), 2000)) == {0, 1, 2, 3}
    assert set(draws(logits, SampleSpec(top_p=1e-9), 200)) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    """Among the two best, 0.5 and 0.25, the first holds two thirds."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert set(draws(logits, SampleSpec(top_k=2, top_p=0.66), 500)) == {0}


def test_extreme_temperatures() -> None:
    assert set(draws(LOGITS * 1e4, SampleSpec(temperature=1e-6), 50)) <= {1, 3}
    assert len(draws(LOGITS, SampleSpec(temperature=1e6), 2000)) == 7


vocabularies = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, 1.0, 3.0])), min_size=1, max_size=40
)
specs = st.builds(
    SampleSpec,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 2, 7, 60]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 100_000),
)


@settings(deadline=None, max_examples=300)
@given(logits=vocabularies, spec=specs, ranked=st.sampled_from([(1, 4), (3, 16), (2,), ()]))
def test_every_draw_follows_the_rules(logits: list[float], spec: SampleSpec, ranked: tuple[int, ...]) -> None:
    """With few tokens ranked at first the draw often has to look beyond them; that must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_RANKED", ranked)
        assert sample(torch.tensor([logits]), [spec])[0].token == by_the_rules(logits, spec)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), rows=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_a_draw_does_not_depend_on_its_batch(data: st.DataObject, rows: int, seed: int) -> None:
    logits = torch.randn(rows, 1500, generator=torch.Generator().manual_seed(seed)) * 3
    asked = data.draw(st.lists(specs, min_size=rows, max_size=rows))
    together = sample(logits, asked)
    assert together == [sample(logits[row : row + 1], [spec])[0] for row, spec in enumerate(asked)]


def test_a_flat_distribution_is_drawn_from_as_a_whole() -> None:
    found = draws(torch.zeros(1, 50_000), SampleSpec(seed=4), 64)
    assert max(found) > 10_000 and len(found) > 60
    slope = torch.linspace(1, 0, 50_000)[None]
    assert max(draws(slope, SampleSpec(seed=4), 64)) > 10_000


# ---------------------------------------------------------------- the uniform number


def test_uniform_is_fixed_for_ever() -> None:
    """Workers of different builds hand requests to each other: these values must not change."""
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(1234567, 0) == 0.5263538514320026
    assert uniform(2**63 - 1, 4096) == 0.37794780839635467


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator for state 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [sampler._mix((1234567 + step * golden) % 2**64) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
def test_uniform_is_in_range(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_uniform_is_spread_evenly_and_neighbours_are_unrelated() -> None:
    values = torch.tensor([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    counts = torch.histc(values, 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 45  # chi-square, 19 degrees of freedom, p = 0.0007
    for left, right in ((values[:-1], values[1:]), (values[:, :-1], values[:, 1:]), (values[:-1, 1:], values[1:, :-1])):
        pair = torch.stack((left.flatten(), right.flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.025


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_of_the_raw_distribution() -> None:
    spec = SampleSpec(temperature=0.2, top_k=1, banned=(1, 3), logprobs=3)
    result = sample(LOGITS, [spec])[0]
    raw = LOGITS[0].double().log_softmax(-1).tolist()
    assert result.token == 6 and result.logprob == pytest.approx(raw[6])
    assert result.top is not None
    assert [token for token, _ in result.top] == [1, 3, 6]
    assert [value for _, value in result.top] == pytest.approx([raw[1], raw[3], raw[6]])


def test_logprobs_only_where_asked() -> None:
    results = sample(LOGITS.expand(3, -1), [SampleSpec(), SampleSpec(logprobs=0), SampleSpec(logprobs=8)])
    assert results[0].logprob is None and results[0].top is None
    assert results[1].logprob is not None and results[1].top == []
    assert results[2].top is not None and results[2].top[-1] == (5, -math.inf)


def test_top_logprobs_break_ties_by_id() -> None:
    result = sample(torch.zeros(1, 3000), [SampleSpec(temperature=0, logprobs=4)])[0]
    assert result.top is not None
    assert [token for token, _ in result.top] == [0, 1, 2, 3]


def test_a_distribution_that_is_none_is_refused() -> None:
    rows = LOGITS.repeat(4, 1)
    rows[1, 2] = torch.nan
    rows[2, 2] = torch.inf
    rows[3] = -torch.inf
    with pytest.raises(BadLogits, match=r"rows \[1, 2, 3\]") as caught:
        sample(rows, [SampleSpec()] * 4)
    assert caught.value.rows == [1, 2, 3]


def test_row_count_must_match() -> None:
    with pytest.raises(ValueError, match="1 rows for 2 specs"):
        sample(LOGITS, [SampleSpec(), SampleSpec()])
    assert sample(torch.empty(0, 8), []) == []
