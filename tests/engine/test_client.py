"""Real engine processes with the bundled model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine.client import EngineClient, OutputStream
from engine.config import EngineConfig
from engine.messages import HandoffFetched, Output, SamplingParams, Submit
from kvstore.errors import ContextLengthExceeded, InternalError, NotReady, SettingsError
from kvstore.hashing import block_keys

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "tests" / "models" / "tiny-chat")
PROMPT = [1, *((index * 37) % 900 + 5 for index in range(69))]
LONG = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.cluster


def config(**more: Any) -> EngineConfig:
    return EngineConfig(model=MODEL, cpu_threads=1, fault_injection=True, **{"num_blocks": 64} | more)


@asynccontextmanager
async def engine(**more: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config(**more))
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.005)


async def at_baseline(client: EngineClient) -> None:
    def there() -> bool:
        stats = client.stats
        busy = stats.requests_running + stats.requests_waiting + stats.requests_fetching
        return stats.blocks_used == stats.blocks_pinned == busy == stats.handoffs_open == 0

    await until(there)


async def ask(client: EngineClient, submit: Submit) -> list[Output]:
    return [output async for output in client.submit(submit)]


def tokens(outputs: list[Output]) -> list[list[int]]:
    count = 1 + max(output.index for output in outputs)
    return [[t for o in outputs if o.index == index for t in o.token_ids] for index in range(count)]


async def test_greedy_answers_are_those_of_transformers() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    async with engine(max_num_tokens=24) as client:
        for length in (1, 31, 32, 33, 64, 70):
            prompt = PROMPT[:length]
            ids = torch.tensor([prompt])
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
            expected = [int(token) for token in out[0, length:]]
            for turn in range(2):
                outputs = await ask(client, Submit(f"{length}.{turn}", prompt, SamplingParams(20, temperature=0.0)))
                assert tokens(outputs) == [expected]
                assert outputs[0].cached_tokens == (length - 1) // 32 * 32
        await at_baseline(client)


async def test_two_processes_hand_off() -> None:
    async with engine(role="context", endpoint="127.0.0.1:1") as context, engine(role="generation") as generation:
        acknowledged: list[HandoffFetched] = []

        def acknowledge(message: HandoffFetched) -> None:
            acknowledged.append(message)
            context.release_handoff(message.handoff_id, message.incarnation)

        generation.on_handoff_fetched = acknowledge
        assert context.ready.fingerprint == generation.ready.fingerprint
        for number, length in enumerate((1, 32, 70)):
            sampling = SamplingParams(max_tokens=20, seed=5, n=2, logprobs=2)
            prompt = PROMPT[:length]
            alone = await ask(generation, Submit(f"a{length}", prompt, sampling, cache_salt="apart"))
            first = await ask(context, Submit(f"c{length}", prompt, sampling, handoff_id=100 + number))
            handle = first[-1].handle
            assert handle is not None and handle.endpoint == "127.0.0.1:1"
            handed = await ask(generation, Submit(f"g{length}", prompt, sampling, handle=handle))
            assert tokens(handed) == tokens(alone)
            assert [o.finish_reason for o in handed] == [o.finish_reason for o in alone]
            assert [o.logprobs[0].token_id for o in handed if o.logprobs] == [t for o in handed for t in o.token_ids]
            assert handed[0].timing is not None and handed[0].timing.fetch_path == "shm"
        await at_baseline(context)
        await at_baseline(generation)
        assert [message.ok for message in acknowledged] == [True] * 3
        assert context.stats.handoffs_done == 3


async def test_every_way_of_leaving_aborts() -> None:
    async with engine() as client:

        async def started(name: str) -> OutputStream:
            stream = client.submit(Submit(name, PROMPT, LONG))
            await anext(stream)
            return stream

        stream = await started("closed")
        await stream.aclose()
        await at_baseline(client)
        assert [output async for output in stream] == []

        task = asyncio.create_task(ask(client, Submit("cancelled", PROMPT, LONG)))
        await until(lambda: client.stats.requests_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_baseline(client)

        stream = await started("dropped")
        await until(lambda: client.stats.requests_running == 1)
        del stream
        await at_baseline(client)
        assert client._streams == {}
        assert client.stats.generated_tokens < 1000


async def test_a_refusal_is_the_error_that_the_engine_named() -> None:
    async with engine(max_seq_len=50) as client:
        assert client.ready.max_seq_len == 50
        with pytest.raises(ContextLengthExceeded, match="70 tokens") as caught:
            await ask(client, Submit("long", PROMPT, LONG))
        assert caught.value.param == "prompt"
        stream = client.submit(Submit("twice", PROMPT[:9], LONG))
        with pytest.raises(ValueError, match="twice is in use"):
            client.submit(Submit("twice", PROMPT[:9], LONG))
        await stream.aclose()


async def test_a_killed_engine_fails_its_requests_at_once() -> None:
    client = await EngineClient.start(config())
    events = client.subscribe_events()
    assert (await anext(events)).cleared
    stream = client.submit(Submit("a", PROMPT, LONG))
    await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(InternalError, match="engine process has ended"):
        async for _ in stream:
            pass
    await client.wait_dead()
    assert time.monotonic() - start < 1.0
    assert not client.alive and "dead" in repr(client)
    with pytest.raises(NotReady):
        client.submit(Submit("b", PROMPT, LONG))
    with pytest.raises(NotReady):
        await client.snapshot_events()
    async for _ in events:
        pass
    await client.close()
    await client.close()


async def test_events_are_a_snapshot_and_then_every_change() -> None:
    async with engine(num_blocks=8) as client:
        await ask(client, Submit("before", PROMPT, SamplingParams(2, temperature=0.0)))
        events = client.subscribe_events()
        snapshot = await anext(events)
        mirror = set(snapshot.stored)
        assert snapshot.cleared and mirror == set(block_keys(PROMPT, 32))
        for seed in range(5):
            await ask(client, Submit(f"{seed}", [seed + 9, *PROMPT], SamplingParams(2, temperature=0.0)))
        last = block_keys([13, *PROMPT], 32)[-1]
        async for event in events:
            assert not event.cleared
            mirror = (mirror | set(event.stored)) - set(event.removed)
            if last in event.stored:
                break
        after = await client.snapshot_events()
        assert set(after.stored) == mirror


async def test_a_terminal_signal_is_the_parents_to_handle_and_close_is_quick() -> None:
    client = await EngineClient.start(config())
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    assert tokens(await ask(client, Submit("a", PROMPT, SamplingParams(3, ignore_eos=True))))
    open_stream = client.submit(Submit("b", PROMPT, LONG))
    start = time.monotonic()
    await client.close()
    assert time.monotonic() - start < 3.0
    with pytest.raises(InternalError):
        async for _ in open_stream:
            pass


FAILING_MODEL = """
from engine.models.registry import model_factory, register_architecture
inner = model_factory({"architectures": ["LlamaForCausalLM"]})
def failing(config, weights, dtype):
    model = inner(config, weights, dtype)
    forward = model.forward
    def checked(ids, meta, pool):
        if (ids == 999).any():
            raise RuntimeError("a step has failed")
        return forward(ids, meta, pool)
    model.forward = checked
    return model
register_architecture("LlamaForCausalLM", failing)
"""


async def test_an_engine_that_fails_in_a_step_says_so_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing.py").write_text(FAILING_MODEL)
    async with engine(custom_module_dirs=(str(tmp_path),)) as client:
        good = client.submit(Submit("good", PROMPT, LONG))
        await anext(good)
        with pytest.raises(InternalError, match="engine process has ended"):
            await ask(client, Submit("bad", [5, 999], SamplingParams(4)))
        with pytest.raises(InternalError):
            async for _ in good:
                pass
        assert not client.alive and "a step has failed" in caplog.text


def test_the_client_runs_on_uvloop() -> None:
    async def main() -> None:
        async with engine() as client:
            sampling = SamplingParams(5, temperature=0.0, ignore_eos=True)
            assert len(await ask(client, Submit("a", PROMPT, sampling))) == 5

    uvloop.run(main())


async def test_a_hung_engine_is_killed() -> None:
    client = await EngineClient.start(config())
    os.kill(client.pid, signal.SIGSTOP)
    await client.close(timeout=0.1)
    assert not client.alive


@pytest.mark.parametrize(
    ("more", "words"), [({"model": "/nowhere"}, "/nowhere"), ({"max_tokens": 0, "num_blocks": None}, "0 KV blocks")]
)
async def test_a_bad_setting_is_told_as_one(more: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        await EngineClient.start(EngineConfig(**{"model": MODEL, "cpu_threads": 1} | more))


def engine_children() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    return [command for command in commands if "engine.process" in command]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_a_cancelled_start_leaves_no_process() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await EngineClient.start(config())
    assert not engine_children()


async def test_an_idle_engine_uses_no_cpu() -> None:
    async with engine() as client:
        await ask(client, Submit("a", PROMPT, SamplingParams(3)))
        await at_baseline(client)

        def ticks() -> int:
            fields = Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        before = ticks()
        await asyncio.sleep(1.0)
        assert ticks() - before <= 1  # of 100 a second


PARENT = """
import asyncio, sys
from engine.client import EngineClient
from engine.config import EngineConfig
async def main():
    client = await EngineClient.start(EngineConfig(model=sys.argv[1], num_blocks=8, cpu_threads=1))
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, MODEL], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    asyncio.run(until(lambda: not is_running(pid)))
