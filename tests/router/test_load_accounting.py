"""C119: whatever becomes of requests, every worker's load returns to nothing and is never below it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from fake_worker import Call, FakeWorker, Script, answer_context, answer_generation, cut_at_once, die_after, fail_with
from router_rig import COMPLETIONS, cluster
from running_router import RunningRouter, eventually

REQUESTS, AT_ONCE = 400, 16


def fickle(rng: random.Random, well: Script) -> Script:
    """Another outcome each time: mostly the right one."""

    async def late(call: Call) -> None:
        await asyncio.sleep(0.02)
        await well(call)

    async def garbage(call: Call) -> None:
        await call.send(b"what?\r\n\r\n")
        call.cut()

    async def empty(call: Call) -> None:
        await call.answer(200, {})

    async def break_off(call: Call) -> None:
        await (die_after(2) if call.json.get("stream") else cut_at_once)(call)

    async def never(call: Call) -> None:
        await asyncio.Event().wait()

    bad = [
        fail_with(400),
        fail_with(429),
        fail_with(500),
        fail_with(503),
        cut_at_once,
        break_off,
        garbage,
        empty,
        never,
    ]

    async def script(call: Call) -> None:
        await (rng.choice(bad) if rng.random() < 0.25 else rng.choice((well, well, late)))(call)

    return script


async def ask(router: RunningRouter, rng: random.Random, outcomes: dict[Any, int]) -> None:
    body = {"model": "fake", "prompt": [rng.randrange(100) for _ in range(40)], "stream": rng.random() < 0.5}
    try:
        async with asyncio.timeout(rng.choice((0.005, 0.03, 5, 5, 5))):
            answer = await router.client.post(COMPLETIONS, json=body)
    except (TimeoutError, httpx.HTTPError) as error:
        outcomes[type(error)] = outcomes.get(type(error), 0) + 1
        return
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif body["stream"]:
        assert answer.text.endswith("data: [DONE]\n\n") or '"error"' in answer.text
    else:
        assert answer.text.startswith("{") and answer.json()["choices"], answer.text
    outcomes[answer.status_code] = outcomes.get(answer.status_code, 0) + 1


async def flap(workers: list[FakeWorker], rng: random.Random) -> None:
    while True:
        await asyncio.sleep(0.05)
        worker = rng.choice(workers)
        port = worker.port
        await worker.stop()
        await asyncio.sleep(0.02)
        await worker.start(port)


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
@pytest.mark.parametrize("kind", ["least_time", "conversation"])
async def test_after_a_storm_nothing_is_left(kind: str, style: str) -> None:
    rng = random.Random(f"{kind} {style}")
    config = {"schedule_style": style, "max_retries": 2, "admission": {"saturation": 2, "max_queue_size": 4}}
    info = {"max_batch_size": 4, "disaggregated_params": {"ctx_info_endpoint": ["h:1"]}}
    limit = {"request_timeout": 0.5}
    async with cluster(3, 2, config, context_info=info, generation_info=info, router={"type": kind}, **limit) as (
        router,
        ctx,
        gen,
    ):
        table = router.router.cluster
        for worker in ctx:
            worker.scripts[COMPLETIONS] = fickle(rng, answer_context)
        for worker in gen:
            worker.scripts[COMPLETIONS] = fickle(rng, answer_generation)
        outcomes: dict[Any, int] = {}
        flapping = asyncio.create_task(flap([*ctx[1:], gen[1]], rng))
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                await ask(router, rng, outcomes)
                assert all(worker.active >= 0 and worker.active_tokens >= 0 for worker in table.workers)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(REQUESTS):
                    group.create_task(one())
        finally:
            flapping.cancel()
            await asyncio.gather(flapping, return_exceptions=True)
        assert outcomes.get(200, 0) > 0 and len(outcomes) > 3
        await eventually(lambda: router.in_flight == 0)
        assert all(policy.in_flight == 0 for policy in table.policies.values())
        assert table.room.waiting == table.room._let_in == 0
        assert all(worker.active_tokens == 0 for worker in table.workers)
