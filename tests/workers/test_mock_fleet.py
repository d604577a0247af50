"""Mock workers behind real sockets: hand-offs, deaths and restarts, `serve --backend mock`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_worker import TINY, completion, until

from engine.config import EngineConfig
from engine.mock_profile import Faults, MockProfile, StepTimes
from kvstore.errors import SettingsError
from trtllm_serve.mock_fleet import MockFleet, MockModel, mock_profile
from trtllm_serve.settings import load_settings

FAST = StepTimes(speed=100)


def model(**profile: Any) -> MockModel:
    return MockModel(str(TINY), EngineConfig("", num_blocks=256), MockProfile(times=FAST, **profile))


def body(**fields: Any) -> dict[str, Any]:
    defaults = {"prompt": "The quick brown fox", "max_tokens": 6, "ignore_eos": True, "model": str(TINY)}
    return completion() | defaults | fields


async def post(client: httpx.AsyncClient, address: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(f"http://{address}/v1/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_two_legs_give_what_one_worker_gives_and_the_pages_are_acknowledged() -> None:
    shared = model()
    async with (
        MockFleet(shared, "context", 2) as context,
        MockFleet(shared, "generation", 2) as generation,
        MockFleet(shared, "aggregated", 1) as alone,
        httpx.AsyncClient() as client,
    ):
        whole = await post(client, alone.addresses[0])
        first = {"request_type": "context_only", "disagg_request_id": 2**41}
        leg = await post(client, context.addresses[1], disaggregated_params=first)
        params = leg["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
        answer = await post(
            client, generation.addresses[0], disaggregated_params=params, prompt=leg["prompt_token_ids"]
        )
        assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
        engine = context.workers[1].engine
        await until(lambda: engine.stats.handoffs_done == 1 and engine.stats.blocks_pinned == 0)
        assert generation.workers[0].engine.stats.fetch_blocks == 1


async def test_the_generation_worker_may_come_first() -> None:
    shared = model()
    async with (
        MockFleet(shared, "context", 1) as context,
        MockFleet(shared, "generation", 1) as generation,
        MockFleet(shared, "aggregated", 1) as alone,
        httpx.AsyncClient() as client,
    ):
        prompt = list(range(10, 210))
        whole = await post(client, alone.addresses[0], prompt=prompt)
        both = {"disagg_request_id": 2**41, "schedule_style": 1}
        second = {"request_type": "generation_only", "ctx_request_id": 2**41, "ctx_info_endpoint": context.addresses[0]}
        first = {"request_type": "context_only"}
        answer, _ = await asyncio.gather(
            post(client, generation.addresses[0], prompt=prompt, disaggregated_params=both | second),
            post(client, context.addresses[0], prompt=prompt, disaggregated_params=both | first),
        )
        assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
        assert generation.workers[0].engine.stats.fetch_blocks == 7


async def test_streams_come_over_the_socket() -> None:
    async with MockFleet(model(), "aggregated", 1) as fleet, httpx.AsyncClient() as client:
        async with client.stream(
            "POST", f"http://{fleet.addresses[0]}/v1/completions", json=body(stream=True)
        ) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) > 2


async def test_a_dead_worker_closes_its_port_and_comes_back_empty() -> None:
    shared = model(faults=Faults(die_at_token=3, restart_after=0.2))
    async with MockFleet(shared, "aggregated", 1) as fleet, httpx.AsyncClient() as client:
        [worker] = fleet.workers
        before = worker.engine
        with pytest.raises(httpx.HTTPError):
            await post(client, worker.address, stream=True)
        await until(lambda: not before.alive)
        await until(lambda: worker.engine is not before and worker.serving.is_set())
        async with httpx.AsyncClient() as again:
            info = (await again.get(f"http://{worker.address}/server_info")).json()
            assert info["incarnation"] == worker.engine.incarnation != before.incarnation
            answer = await post(again, worker.address)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_leaving_ends_every_task() -> None:
    before = len(asyncio.all_tasks())
    async with MockFleet(model(), "context", 5):
        pass
    assert len(asyncio.all_tasks()) == before


def test_a_profile_is_checked() -> None:
    assert mock_profile({"faults": {"die_at_token": 4}}, "x").faults.die_at_token == 4
    with pytest.raises(SettingsError, match="speeed"):
        mock_profile({"times": {"speeed": 4}}, "x")


def test_the_backend_and_its_profile_are_settings() -> None:
    settings = load_settings("m", flags={"backend": "mock", "mock_config": {"times": {"speed": 2.0}}})
    assert settings.engine.backend == "mock"
    assert settings.engine.mock is not None and settings.engine.mock.times.speed == 2.0
    with pytest.raises(SettingsError, match="mock profile"):
        load_settings("m", flags={"mock_config": {"speed": 1}})


def test_the_profile_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    block = text.split("```yaml\n")[1].split("```")[0]
    profile = mock_profile(yaml.safe_load(block), "docs")
    assert profile.faults.die_at_token == 100 and profile.answers and profile.times.prefill_a == 1.2e-10
