"""`trtllm-serve disaggregated` as a process: its start, its refusals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_worker import FakeWorker, answer_generation, fake_workers, hang_until
from running_router import eventually, eventually_async

PATH = "/v1/completions"


async def run_command(*argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtllm_serve", "disaggregated", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, output.decode()


def write_config(directory: Path, **keys: Any) -> str:
    file = directory / "disagg.yaml"
    file.write_text(yaml.safe_dump({"hostname": "127.0.0.1", "port": 0, **keys}))
    return str(file)


@contextlib.asynccontextmanager
async def running(
    directory: Path, ctx: FakeWorker, gen: FakeWorker, *argv: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    config = write_config(
        directory, context_servers={"urls": [ctx.address]}, generation_servers={"urls": [gen.address]}
    )
    report = directory / "deep" / "address"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtllm_serve", "disaggregated", "-c", config, "--report_addr", str(report), *argv),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(report.exists, 30)
        address = report.read_text()
        assert address.endswith("\n") and address.startswith("127.0.0.1:")
        async with httpx.AsyncClient(base_url=f"http://{address.strip()}", trust_env=False, timeout=20) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def wait_healthy(client: httpx.AsyncClient) -> None:
    async def healthy() -> bool:
        return (await client.get("/health")).status_code == 200

    await eventually_async(healthy, 20)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_the_exit_code_names_it(tmp_path: Path, signum: signal.Signals) -> None:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    go_on = asyncio.Event()
    gen.scripts[PATH] = hang_until(go_on, answer_generation)
    async with fake_workers(ctx, gen), running(tmp_path, ctx, gen) as (process, client):
        await wait_healthy(client)
        request = asyncio.ensure_future(client.post(PATH, json={"prompt": "x", "stream": True}))
        await eventually(lambda: len(gen.legs()) == 1)
        process.send_signal(signum)

        async def refused() -> bool:
            try:
                _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            except OSError:
                return True
            writer.close()
            return False

        await eventually_async(refused)
        assert not request.done()
        go_on.set()
        answer = await request
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 10) == 128 + signum


async def test_workers_that_do_not_come_in_time_end_the_router(tmp_path: Path) -> None:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    gen.health = 503
    async with fake_workers(ctx, gen), running(tmp_path, ctx, gen, "-t", "1") as (process, client):
        assert (await client.get("/health")).status_code == 503
        assert await asyncio.wait_for(process.wait(), 20) == 1


async def test_all_problems_of_the_configuration_are_told(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_workers=2, context_servers={"urls": ["bad"]}, schedule_style="x")
    code, output = await run_command("-c", config)
    assert code == 2 and "Traceback" not in output
    for path in ("num_workers:", "context_servers.urls[0]:", "schedule_style:"):
        assert path in output


@pytest.mark.parametrize(
    ("keys", "argv", "message"),
    [
        ({}, (), "context_servers.urls: missing"),
        ({"disagg_cluster": {"cluster_uri": "redis://127.0.0.1:1"}}, (), "port: 0 is possible only with --report_addr"),
        ({}, ("-m", "meta.yaml"), "--metadata_server_config_file: not in this build"),
        ({"hostname": "no.such.host.invalid", "disagg_cluster": {"cluster_uri": "redis://127.0.0.1:1"}, "port": 9},
         (), "hostname:"),
    ],
)  # fmt: skip
async def test_refusals(tmp_path: Path, keys: dict[str, Any], argv: tuple[str, ...], message: str) -> None:
    code, output = await run_command("-c", write_config(tmp_path, **keys), *argv)
    assert code == 2 and message in output and "Traceback" not in output


async def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    code, output = await run_command("-c", str(tmp_path / "absent.yaml"))
    assert code == 2 and "absent.yaml" in output and "Traceback" not in output


async def test_a_bad_process_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_WORKER_PROCESS_ID", "64")
    cluster = {"cluster_uri": "redis://127.0.0.1:1"}
    code, output = await run_command(
        "-c", write_config(tmp_path, disagg_cluster=cluster), "--report_addr", str(tmp_path / "a")
    )
    assert code == 2 and "TRTLLM_DISAGG_WORKER_PROCESS_ID: must be 0 to 63" in output
