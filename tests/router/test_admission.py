"""Bounded waiting before prefill, and the breaker of each worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import Call, FakeWorker, answer_context, fail_with, hang_until
from router_rig import COMPLETIONS, cluster
from running_router import RunningRouter, eventually

from kvstore.errors import NotReady, Overloaded
from kvstore.hashing import block_keys
from kvstore.protocol import ServerInfo, ServerRole
from router.admission import Admission
from router.cluster import MOST_FAILURES
from router.config import AdmissionConfig
from router.policy import Need
from router.policy.round_robin import RoundRobin
from router.worker import Worker, WorkerState

TINY = Path(__file__).parents[1] / "models" / "tiny-chat"
ONE_PLACE = {"max_batch_size": 1}


class Rig:
    """Admission for one context worker with `places`, and a generation worker that does not tell."""

    def __init__(self, places: int | None, **config: Any) -> None:
        self.context, self.generation = RoundRobin(), RoundRobin()
        self.worker = Worker(ServerRole.CONTEXT, "127.0.0.1", 1)
        self.worker.info = ServerInfo(max_batch_size=places)
        self.room = Admission(AdmissionConfig(**{"saturation": 1.0, **config}), self.context, self.generation)
        self.room.set_limits([self.worker], [Worker(ServerRole.GENERATION, "127.0.0.1", 2)])

    async def take(self) -> None:
        await self.room.enter()
        self.context.pick([self.worker], Need())

    def leave(self) -> None:
        self.context.release(self.worker, Need())
        self.room.changed()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TestQueue:
    async def test_places_are_given_in_order(self) -> None:
        rig = Rig(1)
        await rig.take()
        order: list[int] = []

        async def want(number: int) -> None:
            await rig.take()
            order.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(want(number))
                await turns()
            assert rig.room.waiting == 3 and not order
            for given in range(3):
                rig.leave()
                await turns()
                assert order == list(range(given + 1)) and rig.worker.active == 1
        rig.leave()

    async def test_a_newcomer_does_not_overtake(self) -> None:
        rig = Rig(1)
        await rig.take()
        first = asyncio.create_task(rig.take())
        await turns()
        rig.leave()
        second = asyncio.create_task(rig.take())
        await first
        await turns()
        assert rig.worker.active == 1 and not second.done()
        rig.leave()
        await second

    async def test_more_than_the_queue_takes_is_refused_with_a_reason(self) -> None:
        rig = Rig(1, max_queue_size=1)
        await rig.take()
        waiting = asyncio.create_task(rig.take())
        await turns()
        with pytest.raises(Overloaded, match="context workers") as caught:
            rig.room.check()
        assert caught.value.retry_after and rig.room.refused == 1
        rig.leave()
        await waiting

    async def test_the_deadline_of_the_queue(self) -> None:
        rig = Rig(1, queue_timeout_sec=0.02)
        await rig.take()
        with pytest.raises(NotReady, match="room"):
            await rig.take()
        assert rig.room.expired == 1 and rig.room.waiting == 0

    async def test_leaving_the_queue_costs_nothing(self) -> None:
        rig = Rig(1)
        await rig.take()
        tasks = [asyncio.create_task(rig.take()) for _ in range(3)]
        await turns()
        tasks[0].cancel()
        await turns()
        assert rig.room.waiting == 2
        rig.leave()
        tasks[1].cancel()  # at the moment in which its place comes
        await tasks[2]
        assert rig.worker.active == 1 and rig.room.waiting == 0
        rig.leave()
        assert rig.room._let_in == 0

    async def test_workers_that_do_not_tell_have_no_limit(self) -> None:
        rig = Rig(None)
        for _ in range(100):
            await rig.take()
        assert rig.room.waiting == 0


@contextlib.asynccontextmanager
async def small(**admission: Any) -> AsyncIterator[tuple[RunningRouter, FakeWorker, FakeWorker]]:
    config = {"admission": {"saturation": 1, "queue_timeout_sec": 10, **admission}}
    async with cluster(1, 1, config, context_info=ONE_PLACE, generation_info={"max_batch_size": 64}) as (
        router,
        [ctx],
        [gen],
    ):
        yield router, ctx, gen


async def test_overload_is_429_at_once_and_the_accepted_finish() -> None:
    """C163: ten times the capacity; the excess is refused, prefill sees the accepted ones only, /health is quick."""
    async with small(max_queue_size=3) as (router, ctx, _):
        gate = asyncio.Event()
        ctx.scripts[COMPLETIONS] = hang_until(gate, answer_context)
        requests = [asyncio.create_task(router.post(COMPLETIONS, prompt="hi")) for _ in range(20)]
        await eventually(lambda: sum(task.done() for task in requests) == 16)
        refused = [task.result() for task in requests if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert len(ctx.legs()) == 1
        assert (await router.client.get("/health")).status_code == 200
        gate.set()
        answers: list[httpx.Response] = [await task for task in requests]
        assert sum(answer.status_code == 200 for answer in answers) == 4 == len(ctx.legs())
        assert router.in_flight == 0
        assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200


async def test_clients_that_give_up_in_the_queue_never_reach_prefill() -> None:
    async with small() as (router, ctx, _):
        gate = asyncio.Event()
        ctx.scripts[COMPLETIONS] = hang_until(gate, answer_context)
        first = asyncio.create_task(router.post(COMPLETIONS, prompt="hi"))
        await eventually(lambda: len(ctx.legs()) == 1)
        others = [asyncio.create_task(router.post(COMPLETIONS, prompt="hi")) for _ in range(5)]
        room = router.router.cluster.room
        await eventually(lambda: room.waiting == 5)
        for task in others[:4]:
            task.cancel()
        await eventually(lambda: room.waiting == 1)
        gate.set()
        assert (await first).status_code == (await others[4]).status_code == 200
        assert len(ctx.legs()) == 2
        await asyncio.gather(*others, return_exceptions=True)


async def test_waiting_too_long_is_503() -> None:
    async with small(queue_timeout_sec=0.1) as (router, ctx, _):
        gate = asyncio.Event()
        ctx.scripts[COMPLETIONS] = hang_until(gate, answer_context)
        first = asyncio.create_task(router.post(COMPLETIONS, prompt="hi"))
        await eventually(lambda: len(ctx.legs()) == 1)
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 503 and "room" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        gate.set()
        await first


class TestBreaker:
    async def test_failures_in_succession_trip_and_a_trial_closes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.cluster.TRIP_SECONDS", 0.05)
        async with cluster(2, 1) as (router, ctx, _):
            worker = next(each for each in router.router.cluster.workers if each.port == ctx[0].port)
            ctx[0].scripts[COMPLETIONS] = fail_with(500)
            for _ in range(2 * MOST_FAILURES):
                assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
            assert len(ctx[0].legs()) == MOST_FAILURES and worker.trips == 1
            assert f"{MOST_FAILURES} requests failed" in worker.state_reason
            await eventually(lambda: worker.state is WorkerState.TRIAL)
            for _ in range(2):
                assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
            assert worker.trips == 2 and len(ctx[0].legs()) == MOST_FAILURES + 1
            del ctx[0].scripts[COMPLETIONS]
            await eventually(lambda: worker.state is WorkerState.TRIAL)
            for _ in range(2):
                assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
            assert worker.state is WorkerState.READY and worker.failures == worker.trips == 0

    async def test_a_trial_is_one_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.cluster.TRIP_SECONDS", 0.05)
        async with cluster(2, 1) as (router, ctx, _):
            worker = next(each for each in router.router.cluster.workers if each.port == ctx[0].port)
            ctx[0].scripts[COMPLETIONS] = fail_with(500)
            for _ in range(2 * MOST_FAILURES):
                await router.post(COMPLETIONS, prompt="hi")
            seen = len(ctx[0].legs())
            gate = asyncio.Event()
            ctx[0].scripts[COMPLETIONS] = hang_until(gate, answer_context)
            await eventually(lambda: worker.state is WorkerState.TRIAL)
            requests = [asyncio.create_task(router.post(COMPLETIONS, prompt="hi")) for _ in range(6)]
            await eventually(lambda: sum(task.done() for task in requests) == 5)
            assert len(ctx[0].legs()) == seen + 1
            gate.set()
            assert {(await task).status_code for task in requests} == {200}
            assert worker.usable and router.in_flight == 0

    async def test_refusals_are_no_failures(self) -> None:
        async with cluster() as (router, [ctx], _):
            ctx.scripts[COMPLETIONS] = fail_with(400)
            for _ in range(2 * MOST_FAILURES):
                assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 400
            assert all(worker.usable for worker in router.router.cluster.workers)


async def test_conditional_prefill_at_the_generation_worker() -> None:
    """What a generation worker has nearly whole goes to it alone; else both roles serve, as ever."""
    config = {
        "conditional_disagg_config": {"max_local_prefill_length": 40},
        "model": "unused",
    }
    info = {"incarnation": "g", "tokens_per_block": 32}
    tiny = str(TINY)
    async with cluster(1, 1, config, generation_info=info, tokenizer_path=tiny) as (router, [ctx], [gen]):
        worker = next(each for each in router.router.cluster.workers if each.port == gen.port)
        ids = list(range(3, 103))
        assert worker.blocks is not None
        router.router.cluster.index.add(worker.blocks, block_keys(ids, 32))

        async def whole(call: Call) -> None:
            sent = call.json
            await call.answer(200, {"choices": [sent.get("disaggregated_params", "absent"), sent["prompt"]]})

        gen.scripts[COMPLETIONS] = whole
        answer = await router.post(COMPLETIONS, prompt=[*ids[:96], 7, 8])
        assert answer.json() == {"choices": [None, [*ids[:96], 7, 8]]} and not ctx.legs()
        assert f":{gen.port}" in answer.headers["x-trtllm-generation-worker"]
        await router.post(COMPLETIONS, prompt=[*ids[:96], *range(200, 260)])  # 60 tokens are missing
        await router.post(COMPLETIONS, prompt=list(range(500, 520)))  # nothing is there
        assert len(ctx.legs()) == 2
        assert router.router.metrics.local_prefills == 1 and router.in_flight == 0
