"""Both schedule styles through the real router, with signed hand-offs and least_time: one server's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_pair import SHM
from cluster_rig import Cluster, Part, baseline, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

KEY = {"internal_request_auth_key": "between us"}
WORDS = ["apple", "river", "stone", "house", "tree", "blue", "green", "wind", "cloud", "rain", "sun", "moon"]
STYLES = ["context_first", "generation_first"]


class Styles:
    """Two context workers, one generation worker, one server for comparison, and a router of each style."""

    def __init__(self, cluster: Cluster) -> None:
        cluster.start_registry()
        self.contexts = [cluster.worker(f"context{place}", "CONTEXT", SHM | KEY) for place in range(2)]
        self.generation = cluster.worker("generation", "GENERATION", SHM | KEY)
        self.aggregated = cluster.worker("aggregated", None)
        self.routers = {
            style: cluster.router({"context_servers": {}, "schedule_style": style} | KEY, name=style)
            for style in STYLES
        }
        cluster.start_all(*self.contexts, self.generation, self.aggregated, *self.routers.values())
        for router in self.routers.values():
            eventually(lambda router=router: self.live(router), 20, "both context workers tell their KV events")

    @staticmethod
    def live(router: Part) -> bool:
        info = httpx.get(router.url + "/cluster_info", timeout=5).json()
        assert info["policies"]["context"]["type"] == "least_time"
        told = [worker["kv_events"] for worker in info["workers"] if worker["role"] == "context"]
        return told == ["live", "live"] and not info["degraded"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Styles]:
    with Cluster(Path(tmp_path_factory.mktemp("styles"))) as cluster:
        yield Styles(cluster)


def ask(part: Part, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(part.url + "/v1/completions", json={"model": "tiny", **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of_stream(part: Part, body: dict[str, Any]) -> str:
    answer = httpx.post(part.url + "/v1/completions", json={"model": "tiny", "stream": True, **body}, timeout=30)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in httpx.Response(200, text=event).json()["choices"])


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_one_servers(rig: Styles, style: str) -> None:
    for number in range(12):
        said = " ".join(WORDS[number % 7 :] * (1 + number % 5))
        prompt = f"<|im_start|>user\nRepeat: {said}<|im_end|>\n<|im_start|>assistant\n"
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        body = {"prompt": prompt, "max_tokens": [1, 12, 40][number % 3], **sampling}
        expected = ask(rig.aggregated, body)
        got = ask(rig.routers[style], body)
        assert got["choices"][0]["text"] == expected["choices"][0]["text"]
        assert got["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
        assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        assert text_of_stream(rig.routers[style], body) == expected["choices"][0]["text"]
    baseline(*rig.contexts, rig.generation)


def test_the_prediction_is_what_the_worker_then_finds(rig: Styles) -> None:
    """C111, C122: text, token ids and chat agree with the worker's own count of cached tokens."""
    router = rig.routers["context_first"]
    text = "<|im_start|>user\nNumbers: " + " ".join(map(str, range(70))) + "<|im_end|>\n<|im_start|>assistant\n"
    ids = httpx.post(router.url + "/tokenize", json={"prompt": text}, timeout=5).json()["tokens"]
    messages = [{"role": "user", "content": "Name these: " + " ".join(WORDS * 6)}]
    for path, body in (
        ("completions", {"prompt": text}),
        ("completions", {"prompt": ids}),
        ("chat", {"messages": messages}),
    ):
        url = router.url + ("/v1/chat/completions" if path == "chat" else "/v1/completions")
        request = {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}
        first = httpx.post(url, json=request, timeout=30)
        holder = first.headers["x-trtllm-context-worker"]
        told: dict[str, Any] = {}

        def confirmed(request: dict[str, Any] = request, told: dict[str, Any] = told) -> bool:
            told |= httpx.post(router.url + "/explain", json=request, timeout=5).json()
            return bool(told["context"]["candidates"][0]["matched_tokens"] >= 64)

        eventually(confirmed, 5, "the index knows the prompt's blocks")
        best = told["context"]["candidates"][0]
        again = httpx.post(url, json=request, timeout=30)
        assert again.headers["x-trtllm-context-worker"] == best["worker"] == holder
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == best["matched_tokens"]


def test_a_worker_serves_no_hand_off_that_is_not_signed(rig: Styles) -> None:
    params = {"request_type": "generation_only", "ctx_request_id": 2**41, "schedule_style": 1}
    body = {"model": "tiny", "prompt": "x", "disaggregated_params": params | {"ctx_info_endpoint": "127.0.0.1:1"}}
    answer = httpx.post(rig.generation.url + "/v1/completions", json=body, timeout=10)
    assert answer.status_code == 400 and "signed" in answer.json()["error"]["message"]
