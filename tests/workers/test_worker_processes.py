"""`trtllm-serve serve` as real processes: start, hand-off between two workers, orderly end, every way to fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cluster_rig import Cluster, Part, baseline, complete, eventually, gauges

from kvstore.protocol import worker_key_prefix

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

REPEAT = "<|im_start|>user\nRepeat: apple river stone house tree blue<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("workers"), faults=True) as cluster:
        cluster.start_registry()
        yield cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> tuple[Part, Part]:
    context, generation = cluster.worker("context", "CONTEXT"), cluster.worker("generation", "GENERATION")
    cluster.start_all(context, generation)
    return context, generation


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": REPEAT, "max_tokens": 32, "temperature": 0} | fields


def both_legs(pair: tuple[Part, Part], body: dict[str, Any], handoff_id: int) -> dict[str, Any]:
    context, generation = (part.url + "/v1/completions" for part in pair)
    params = {"request_type": "context_only", "disagg_request_id": handoff_id}
    answer = httpx.post(context, json=body | {"disaggregated_params": params}, timeout=30).json()
    params = answer["choices"][0]["disaggregated_params"]
    params |= {"request_type": "generation_only", "ctx_usage": answer["usage"]}
    second = body | {"prompt": answer["prompt_token_ids"], "disaggregated_params": params}
    answer = httpx.post(generation, json=second, timeout=30).json()
    assert "choices" in answer, answer
    document: dict[str, Any] = answer
    return document


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}])
def test_two_workers_say_what_one_says(pair: tuple[Part, Part], sampling: dict[str, Any]) -> None:
    body = request(**sampling, logprobs=2)
    before = gauges(pair[1])["fetched_blocks_total"]
    ours = both_legs(pair, body, (1 << 41) + len(sampling))
    reference = httpx.post(pair[0].url + "/v1/completions", json=body, timeout=30).json()
    ours_choice, reference_choice = ours["choices"][0], reference["choices"][0]
    for name in ("text", "token_ids", "finish_reason"):
        assert ours_choice[name] == reference_choice[name]
    assert ours_choice["logprobs"]["tokens"] == reference_choice["logprobs"]["tokens"]
    assert ours["usage"]["total_tokens"] == reference["usage"]["total_tokens"]
    if sampling["temperature"] == 0:
        assert ours_choice["text"] == "apple river stone house tree blue"
        assert gauges(pair[1])["fetched_blocks_total"] > before
    baseline(*pair)


def test_both_are_registered(cluster: Cluster, pair: tuple[Part, Part]) -> None:
    assert registered(cluster) >= {part.address for part in pair}


def registered(cluster: Cluster) -> set[str]:
    import redis

    with redis.Redis.from_url(cluster.registry_uri, decode_responses=True) as store:
        keys = list(store.scan_iter(worker_key_prefix("") + "*"))
    return {key.rsplit("/", 1)[1].split("-")[1] for key in keys}


# ---------------------------------------------------------------------- the end


def test_sigterm_leaves_the_registry_finishes_requests_and_exits_143(cluster: Cluster) -> None:
    worker = cluster.worker("leaving", "GENERATION").start()
    eventually(lambda: worker.address in registered(cluster), 5, "registered")
    httpx.put(worker.url + "/debug/delays", json={"step": 0.05}, timeout=5).raise_for_status()
    replies: list[Any] = []
    body = request(stream=True, ignore_eos=True, max_tokens=40)
    client = threading.Thread(target=lambda: replies.append(complete(worker.url, body)))
    client.start()
    eventually(lambda: gauges(worker)["requests_running"], 5, "running")
    worker.signal(signal.SIGTERM)
    eventually(lambda: worker.address not in registered(cluster), 2, "deregistered")
    assert worker.health() == 503
    client.join(30)
    assert worker.stop() == 128 + signal.SIGTERM
    assert replies[0].done
    assert replies[0].finish_reason == "length"
    assert len(replies[0].token_ids) == 40


def test_a_second_signal_cuts_it_short(cluster: Cluster) -> None:
    worker = cluster.worker("hurried", None).start()
    httpx.put(worker.url + "/debug/delays", json={"step": 20}, timeout=5).raise_for_status()
    replies: list[Any] = []

    def ask() -> None:
        try:
            replies.append(complete(worker.url, request()))
        except httpx.HTTPError as error:
            replies.append(error)

    client = threading.Thread(target=ask)
    client.start()
    eventually(lambda: gauges(worker)["requests_total"], 5, "asked")
    worker.signal(signal.SIGINT)
    eventually(lambda: worker.health() == 503, 1, "told")
    worker.signal(signal.SIGINT)
    assert worker.process is not None
    assert worker.process.wait(5) == 128 + signal.SIGINT
    client.join(10)
    assert replies


def test_the_engines_death_ends_the_server(cluster: Cluster) -> None:
    worker = cluster.worker("bereft", "CONTEXT").start()
    eventually(lambda: worker.address in registered(cluster), 5, "registered")
    httpx.put(worker.url + "/debug/delays", json={"step": 0.1}, timeout=5).raise_for_status()
    replies: list[Any] = []
    bodies = [request(ignore_eos=True), request(ignore_eos=True, stream=True)]
    clients = [
        threading.Thread(target=lambda body=body: replies.append(complete(worker.url, body)))  # type: ignore[misc]
        for body in bodies
    ]
    for client in clients:
        client.start()
    eventually(lambda: gauges(worker)["requests_running"] == 2, 5, "both run")
    (engine,) = psutil.Process(worker.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    for client in clients:
        client.join(10)
    for reply in replies:
        assert reply.error is not None
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert reply.finish_reason is None
    assert worker.process is not None
    assert worker.process.wait(15) == 1
    assert worker.address not in registered(cluster)


def test_the_servers_death_ends_the_engine(cluster: Cluster) -> None:
    worker = cluster.worker("killed", None).start()
    (engine,) = psutil.Process(worker.pid).children()
    worker.kill()
    eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5, "engine gone")


# ---------------------------------------------------------------------- start-up that fails


def run(cluster: Cluster, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [*cluster.worker("probe", None).argv[:3], "serve", str(cluster.model), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=cluster.env)


def test_a_port_in_use_is_exit_3(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run(cluster, "--host", "127.0.0.1", "--port", str(port))
    assert result.returncode == 3, result.stderr
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_settings_are_exit_2_with_all_problems(cluster: Cluster) -> None:
    result = run(cluster, "--port", "0", "--pp_size", "2", "--set", "kv_cache_config.colour=1")
    assert result.returncode == 2, result.stderr
    assert "pipeline_parallel_size" in result.stderr
    assert "kv_cache_config.colour" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_such_model_is_exit_2(cluster: Cluster, tmp_path: Path) -> None:
    command = [*cluster.worker("probe", None).argv[:3], "serve", str(tmp_path / "nowhere"), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=cluster.env)
    assert result.returncode == 2, result.stderr
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr
