"""C075: reasoning through the hand-off is split and counted as on one server, wherever the tags fall."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import SCRIPTED, Cluster, Part, baseline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=["deepseek-r1", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("reasoning"), model=SCRIPTED) as cluster:
        made = Pair(cluster, "shm", reasoning_parser=request.param)
        made.transport = request.param
        yield made


def ask(part: Part, script: str, stream: bool) -> tuple[str, str, str, dict[str, Any]]:
    """(reasoning, content, finish reason, usage without what differs by where the prompt was computed)."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": f"$SCRIPT:{script}"}]}
    body |= {"max_tokens": 40, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(part.url + "/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    said, usage = {"reasoning_content": "", "content": ""}, events[-1]["usage"]
    reason = ""
    for choice in (choice for event in events for choice in event["choices"]):
        for name, text in choice.get("delta" if stream else "message").items():
            if name in said:
                said[name] += text
        reason = choice["finish_reason"] or reason
    usage.pop("prompt_tokens_details")
    return said["reasoning_content"], said["content"], reason, usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "opened", "tagged"),
    [
        ("</think>|b|c", ("", "bc", 8), ("", "</think>bc", 0)),
        ("<think>|a|</think>|b", ("a", "b", 16), ("a", "b", 10)),
        ("a|</think>|b", ("a", "b", 9), ("", "a</think>b", 0)),
        ("<think>|never", ("never", "", 13), ("never", "", 7)),
        ("EOS", ("", "", 1), ("", "", 0)),
    ],
)
def test_as_on_one_server(
    pair: Pair, script: str, opened: tuple[str, str, int], tagged: tuple[str, str, int], stream: bool
) -> None:
    """One token a byte: a tag is spread over the hand-off. Tokens count as reasoning from where it is known to be."""
    ours, reference = ask(pair.router, script, stream), ask(pair.aggregated, script, stream)
    assert ours == reference
    reasoning, content, finish, usage = ours
    expected = opened if pair.transport == "deepseek-r1" else tagged
    assert (reasoning, content, usage["completion_tokens_details"]["reasoning_tokens"]) == expected
    assert finish == "stop"
    baseline(*pair.workers)
