"""The demo behind scripts/demo: a local cluster, three chat requests, one line and one answer each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx

START_LIMIT_S = 300.0
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "local.yaml"

GUIDE = (
    "You are the guide of a small museum of science. Answer in one or two short sentences. The ground floor shows "
    "steam engines, pumps and the first electric lamps. The first floor shows telescopes, clocks and maps of the night "
    "sky. The second floor shows computers, from adding machines to modern chips. The museum opens at nine in the "
    "morning and closes at six in the evening, and it is closed on Mondays. Children under ten enter for free. There "
    "is a cafe on the ground floor and a book shop next to the entrance."
)
CODES = (
    "The code of apple is 412. The code of river is 87. The code of stone is 935. The code of house is 6. "
    "The code of tree is 250. The code of blue is 711. "
)
Message = dict[str, str]
CHATS: dict[str, list[list[Message]]] = {
    "tiny": [
        [{"role": "user", "content": CODES + "What is the code of stone?"}],
        [{"role": "user", "content": CODES + "What is the code of blue?"}],
        [{"role": "user", "content": "Repeat: apple river stone house tree blue"}],
    ],
    "chat": [
        [{"role": "system", "content": GUIDE}, {"role": "user", "content": "What can I see on the first floor?"}],
        [{"role": "system", "content": GUIDE}, {"role": "user", "content": "When does the museum open?"}],
        [{"role": "user", "content": "What is the capital of France?"}],
    ],
}


@dataclasses.dataclass
class Answer:
    """What one streamed chat request showed, times in milliseconds as the client saw them or as the servers said."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    route: str = ""
    first_token_ms: float = 0.0
    tokens_per_s: float = 0.0
    server_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    def line(self, number: int) -> str:
        def ms(name: str) -> str:
            return f"{self.server_ms[name]:.0f}" if name in self.server_ms else "-"

        return (
            f"req {number}   {self.prompt_tokens:4d} tok   cached {self.cached_tokens:4d}   {self.route}   "
            f"queue {ms('ctx_queue')}   prefill {ms('ctx_prefill')}   hand-off {ms('gen_handoff')}   "
            f"first token {self.first_token_ms:.0f} ms   {self.completion_tokens} tok at {self.tokens_per_s:.0f}/s"
        )


def parse_server_timing(header: str) -> dict[str, float]:
    """Milliseconds by entry name from a `Server-Timing` header."""
    return {name: float(ms) for name, ms in re.findall(r"([\w.-]+)(?:;desc=\"?[^;,\"]*\"?)?;dur=([0-9.]+)", header)}


def chat(client: httpx.Client, model: str, messages: list[Message]) -> Answer:
    """One streamed request; raises httpx.HTTPStatusError or RuntimeError with the server's words."""
    answer = Answer()
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = start
    headers = {"X-TRTLLM-return-metrics": "1"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode()}")
        context = response.headers.get("x-trtllm-context-worker", "?")
        generation = response.headers.get("x-trtllm-generation-worker", "-")
        answer.route = f"{context} → {generation}"
        answer.server_ms = parse_server_timing(response.headers.get("server-timing", ""))
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = first if answer.text else last
                    answer.text += choice["delta"]["content"]
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    answer.first_token_ms = (first - start) * 1000
    if answer.completion_tokens > 1 and last > first:
        answer.tokens_per_s = (answer.completion_tokens - 1) / (last - first)
    return answer


@contextlib.contextmanager
def local_cluster(model: str, port: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`trtllm-serve local` as a child; yields it and the file in which it reports its address. Ended on exit."""
    with tempfile.TemporaryDirectory(prefix="trtllm-demo-") as directory:
        report = Path(directory) / "address"
        argv = [sys.executable, "-m", "trtllm_serve", "local", "-c", str(CONFIG)]
        argv += ["--model", model, "--port", str(port), "--report_addr", str(report)]
        process = subprocess.Popen(argv, start_new_session=True)
        try:
            yield process, report
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_for_address(process: subprocess.Popen[bytes], report: Path) -> str:
    """host:port once the cluster serves. ClickException when it ends or does not come up."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if report.exists():
            return report.read_text().strip()
        if process.poll() is not None:
            raise click.ClickException(f"the cluster ended at start-up with exit code {process.returncode}")
        time.sleep(0.05)
    raise click.ClickException(f"the cluster was not ready after {START_LIMIT_S:.0f} s")


def show_requests(address: str, chats: list[list[Message]]) -> None:
    with httpx.Client(base_url=f"http://{address}", timeout=120.0) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for number, messages in enumerate(chats, start=1):
            answer = chat(client, model, messages)
            click.echo(answer.line(number))
            click.echo(f"        {messages[-1]['content'][-60:]!r} -> {answer.text.strip()!r}")


@click.command()
@click.option("--once", is_flag=True, help="End after the three requests instead of serving on.")
@click.option(
    "--model", default="SmolLM2-135M-Instruct", show_default=True, help="Model, or 'tiny' for the bundled one."
)
@click.option("--port", default=8000, show_default=True, help="Port of the router; 0 picks a free one.")
def main(once: bool, model: str, port: int) -> None:
    """Start a local cluster, send three chat requests, and keep serving until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), local_cluster(model, 0 if once else port) as (process, report):
        address = wait_for_address(process, report)
        show_requests(address, CHATS["tiny" if model == "tiny" else "chat"])
        if once:
            return
        click.echo(f"serving http://{address}/v1 until Ctrl-C")
        code = process.wait()
        raise click.ClickException(f"the cluster ended with exit code {code}")


if __name__ == "__main__":
    main()
