"""Hand-offs by NIXL and by Mooncake's TransferEngine between real processes: same tokens, the asked path, no leaks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import Cluster, baseline, complete, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=["NIXL", "MOONCAKE"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("nixl" if request.param == "NIXL" else "mooncake")
    with Cluster(tmp_path_factory.mktemp(request.param.lower())) as cluster:
        yield Pair(cluster, request.param, cache_transceiver_config={"backend": request.param})


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 900) for _ in range(length)]


def test_same_tokens_by_the_asked_path(pair: Pair) -> None:
    def check(seed: int) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt(seed, 20 + 37 * seed), "max_tokens": 8}
        body |= {"seed": seed, "temperature": 0.8}
        ours, reference = complete(pair.router.url, body), complete(pair.aggregated.url, body)
        assert ours.status == reference.status == 200, (ours, reference)
        assert (ours.token_ids, ours.text) == (reference.token_ids, reference.text)

    before = gauges(pair.generation)
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(check, range(12)))
    after = gauges(pair.generation)
    blocks = sum(-(-(20 + 37 * seed) // 32) for seed in range(12))
    assert after["fetched_blocks_total"] - before["fetched_blocks_total"] == blocks
    assert after["handoffs_fetched_total"] - before["handoffs_fetched_total"] == 12
    baseline(*pair.workers)


def test_server_info_says_which_and_why(pair: Pair) -> None:
    for worker in pair.workers:
        info = httpx.get(worker.url + "/server_info", timeout=5).json()
        assert info["transfers"] == [pair.transport.lower()]
        assert info["transfer_choice"] == f"hand-offs by {pair.transport.lower()}"
    plain = httpx.get(pair.aggregated.url + "/server_info", timeout=5).json()
    assert plain["transfers"] == [pair.transport.lower()]


def test_a_restarted_context_worker(pair: Pair) -> None:
    """C103: a new incarnation at the same place is a new peer; what the old one promised is recomputed."""
    body = {"model": "tiny", "prompt": prompt(77, 100), "max_tokens": 6, "temperature": 0}
    reference = complete(pair.aggregated.url, body)
    promise = body | {"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 2**41}}
    answer = httpx.post(pair.context.url + "/v1/completions", json=promise, timeout=30).json()
    params = answer["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
    pair.context.kill()
    pair.context.start()
    late = complete(pair.generation.url, body | {"disaggregated_params": params})
    assert (late.status, late.token_ids) == (200, reference.token_ids)
    for _ in range(3):
        again = complete(pair.router.url, body | {"prompt": prompt(78, 100)})
        if again.status == 200:
            break
    assert again.status == 200
    baseline(*pair.workers)
