"""C031, C032, C038, C039, C046, C072, C073, C155: seeds, choices, scores, counts and statistics of real servers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import TINY, Cluster, Part, baseline, complete, eventually
from golden_requests import difference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

STATISTICS = {"enable_iter_perf_stats": True}


@pytest.fixture(scope="module")
def told_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose workers keep statistics of their steps."""
    with Cluster(tmp_path_factory.mktemp("sampling")) as cluster:
        yield Pair(cluster, "shm", **STATISTICS)


def answer(part: Part, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    response = httpx.post(part.url + path, json={"model": "tiny", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def texts(document: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in document["choices"]]


# ---------------------------------------------------------------- seeds

SEEDED = {"prompt": "Once", "max_tokens": 20, "temperature": 1, "seed": 7}


def test_a_seed_is_an_answer(told_pair: Pair) -> None:
    """C031: alone, in a crowd, on either path and after a restart. Without a seed, workers that started together and
    two calls of one worker differ. Seeds at the ends of their range are served."""
    expected = texts(answer(told_pair.aggregated, SEEDED))
    parts = [told_pair.aggregated, told_pair.router]
    with ThreadPoolExecutor(12) as clients:
        noise = [
            clients.submit(answer, parts[number % 2], {"prompt": f"{number}", "max_tokens": 40, "temperature": 1.3})
            for number in range(16)
        ]
        for part in parts * 3:
            assert texts(answer(part, SEEDED)) == expected
        for each in noise:
            each.result(60)
    free = SEEDED | {"seed": None}
    workers = [*told_pair.workers, told_pair.aggregated, told_pair.aggregated, told_pair.router]
    assert len({texts(answer(part, free))[0] for part in workers}) == len(workers)
    for seed in (2**31, -1, 2**63 - 1, 0, -(2**63)):
        assert texts(answer(told_pair.router, SEEDED | {"seed": seed})) == texts(
            answer(told_pair.aggregated, SEEDED | {"seed": seed})
        )
    beyond = httpx.post(told_pair.router.url + "/v1/completions", json={"model": "tiny", **SEEDED, "seed": 2**63})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "seed")
    told_pair.aggregated.stop()
    told_pair.aggregated.start()
    assert texts(answer(told_pair.aggregated, SEEDED)) == expected


def test_choices_of_one_seed(told_pair: Pair) -> None:
    """C032: choices differ from each other and not from call to call; one prefill, whose prompt counts once."""
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1, "seed": 7}
    one = answer(told_pair.router, body)
    before = metric(told_pair.context, "trtllm_prompt_tokens_total")
    runs = [answer(part, body | {"n": 4}) for part in (told_pair.router, told_pair.router, told_pair.aggregated)]
    prompt = one["usage"]["prompt_tokens"]
    assert metric(told_pair.context, "trtllm_prompt_tokens_total") - before == 2 * prompt
    for run in runs:
        assert [choice["index"] for choice in run["choices"]] == [0, 1, 2, 3]
        assert texts(run) == texts(runs[0]) and len(set(texts(run))) > 1
        assert run["usage"]["prompt_tokens"] == prompt
        assert run["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in run["choices"])
    greedy = texts(answer(told_pair.router, body | {"n": 4, "temperature": 0}))
    assert len(greedy) == 4 and len(set(greedy)) == 1


def test_the_draw_goes_on_after_the_hand_off(told_pair: Pair) -> None:
    """C072: fifty seeds, and choices of one seed; the second token is no echo of the first one's random number."""
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5, "ignore_eos": True}

    def ask(seed: int) -> list[list[int]]:
        request = body | {"seed": seed, "n": 3 if seed % 5 == 0 else 1}
        ours, expected = (
            [choice["token_ids"] for choice in answer(part, request)["choices"]]
            for part in (told_pair.router, told_pair.aggregated)
        )
        assert ours == expected, seed
        return ours

    with ThreadPoolExecutor(8) as clients:
        answers = [tokens for each in clients.map(ask, range(50)) for tokens in each]
    assert len(set(map(tuple, answers))) > 40
    assert sum(tokens[0] == tokens[1] for tokens in answers) < 10


# ---------------------------------------------------------------- log-probabilities against a model of its own


@pytest.fixture(scope="module")
def reference() -> Any:
    """Log-probabilities [tokens, vocabulary] of transformers' own model for token ids."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return logits


@pytest.mark.parametrize("side", ["aggregated", "router"])
def test_a_prompts_scores(told_pair: Pair, reference: Any, side: str) -> None:
    """C038: prompt tokens have the log-probabilities of a plain forward pass, also when their KV is cached, and places
    in the text; several prompts in one request are scored each on its own, or refused."""
    part = getattr(told_pair, side)
    prompts = [[5, 6, 7, 8, 9], [random.Random(5).randint(3, 900) for _ in range(70)]]
    for prompt in [*prompts, *prompts]:
        document = answer(part, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1})
        [choice] = document["choices"]
        check_scores(choice, [*prompt, *choice["token_ids"]], reference)
        assert document["usage"]["completion_tokens"] == 1
    several = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 2}
    if side == "router":
        refused = httpx.post(part.url + "/v1/completions", json={"model": "tiny", **several}, timeout=30)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        return
    choices = answer(part, several)["choices"]
    for choice, prompt in zip(choices, [[5, 6, 7], [8, 9]], strict=True):
        check_scores(choice, prompt, reference)


def check_scores(choice: dict[str, Any], ids: list[int], reference: Any) -> None:
    scored, logprobs = choice["logprobs"], reference(ids).log_softmax(-1)
    assert len(scored["tokens"]) == len(scored["token_logprobs"]) == len(ids)
    assert scored["token_logprobs"][0] is None
    for place, token in enumerate(ids[1:], 1):
        assert scored["token_logprobs"][place] == pytest.approx(float(logprobs[place - 1, token]), abs=1e-3)
        best = max(scored["top_logprobs"][place].values())
        assert best == pytest.approx(float(logprobs[place - 1].max()), abs=1e-3)
    offsets = scored["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == len(ids)
    for token, offset in zip(scored["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or token.startswith("<|") or choice["text"][offset:].startswith(token)


def test_penalties_go_on_after_the_hand_off(told_pair: Pair, reference: Any) -> None:
    """C073: numbers, not status: each token's processed log-probability is that of the reference's logits under the
    same penalties, of which repetition sees the prompt and the hand-off's token, and the others that token only."""
    import torch

    prompt = [5, 6, 7, 5, 6, 7]
    settings = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.75,
        "logit_bias": {"40": 3.0},
    }
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "min_tokens": 4, "logprobs": 5, **settings}
    document = answer(told_pair.router, body | {"logprobs_mode": "processed_logprobs"})
    [choice] = document["choices"]
    assert len(choice["token_ids"]) == 4
    for place, token in enumerate(choice["token_ids"]):
        said = choice["token_ids"][:place]
        logits = reference(prompt + said)[-1].clone()
        logits[40] += 3.0
        for seen in {*prompt, *said}:
            logits[seen] = logits[seen] / 2.0 if logits[seen] > 0 else logits[seen] * 2.0
        for seen in set(said):
            logits[seen] -= 1.5 + 0.75 * said.count(seen)
        logits[2] = -torch.inf  # EOS, before min_tokens
        expected = logits.log_softmax(-1)
        assert token == int(expected.argmax())
        assert choice["logprobs"]["token_logprobs"][place] == pytest.approx(float(expected[token]), abs=1e-3)
    same = answer(told_pair.aggregated, body)
    assert difference(choice["logprobs"], same["choices"][0]["logprobs"]) is None


# ---------------------------------------------------------------- counts

COUNTERS = ["trtllm_prompt_tokens_total", "trtllm_prompt_cached_tokens_total", "trtllm_generation_tokens_total"]


def metric(part: Part, name: str) -> float:
    lines = httpx.get(part.url + "/prometheus/metrics", timeout=5).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def test_cached_tokens(told_pair: Pair) -> None:
    """C039: none of a new prompt, its whole blocks the second time, streamed or not; and what both roles count is
    together what the client was told."""
    rng = random.Random(39)
    body: dict[str, Any] = {"prompt": [rng.randint(3, 900) for _ in range(100)], "max_tokens": 2, "temperature": 0}
    body |= {"model": "tiny", "ignore_eos": True}
    before = [sum(metric(part, name) for part in told_pair.workers) for name in COUNTERS]
    usages = [complete(told_pair.router.url, body).usage for _ in range(2)]
    usages.append(
        complete(told_pair.router.url, body | {"stream": True, "stream_options": {"include_usage": True}}).usage
    )
    assert usages[1] == usages[2]
    for usage, cached in zip(usages, (0, 96, 96), strict=True):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, 2)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    def counted() -> bool:
        now = [sum(metric(part, name) for part in told_pair.workers) for name in COUNTERS]
        return [after - start for after, start in zip(now, before, strict=True)] == [300, 192, 6]

    eventually(counted, 5, "the counters of both roles add up to the usage")
    reference = complete(told_pair.aggregated.url, body).usage
    assert reference is not None and reference["prompt_tokens"] == 100
    baseline(*told_pair.workers)


# ---------------------------------------------------------------- many at once


@pytest.mark.parametrize("side", ["aggregated", "router"])
def test_sixty_four_chats_at_once(told_pair: Pair, side: str) -> None:
    """C046: lengths on both sides of where tokenising moves to threads; each answer is that of its prompt alone."""
    part = getattr(told_pair, side)

    def ask(number: int) -> tuple[str, int]:
        words = f"req-{number} " * (number % 17 + 1) * (40 if number % 16 == 3 else 1)
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 2 + number % 7, "temperature": 0}
        document = answer(part, body, "/v1/chat/completions")
        return document["choices"][0]["message"]["content"], document["usage"]["prompt_tokens"]

    expected = [ask(number) for number in range(64)]
    with ThreadPoolExecutor(64) as clients:
        for _ in range(3):
            assert list(clients.map(ask, range(64))) == expected


# ---------------------------------------------------------------- statistics of steps


def polled(part: Part) -> list[dict[str, Any]]:
    response = httpx.get(part.url + "/metrics", timeout=10)
    assert response.headers["content-type"] == "application/json"
    return list(response.json())


def test_steps_are_told_once(told_pair: Pair) -> None:
    """C155: two pollers, and a scraper beside them, get every step between them exactly once; then there is nothing."""
    part = told_pair.aggregated
    eventually(lambda: polled(part) == [], 5, "earlier steps were read")
    body = {"prompt": "Hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as clients:
        request = clients.submit(answer, part, body)
        found: list[list[dict[str, Any]]] = []

        def poll() -> list[dict[str, Any]]:
            mine = []
            while not request.done():
                mine += polled(part)
                httpx.get(part.url + "/prometheus/metrics", timeout=10)
            return mine

        found = [each.result(60) for each in [clients.submit(poll), clients.submit(poll)]]
    records = [record for mine in found for record in mine]

    def all_told() -> bool:
        records.extend(polled(part))
        return len(records) >= 60

    eventually(all_told, 5, "a record of each step")
    steps = sorted(record["iter"] for record in records)
    assert steps == list(range(steps[0], steps[0] + len(steps))) and len(steps) == 60
    assert polled(part) == []
    names = {"usedNumBlocks", "freeNumBlocks", "maxNumBlocks", "tokensPerBlock", "reusedBlocks", "missedBlocks"}
    assert names <= {*records[0]["kvCacheStats"]}
