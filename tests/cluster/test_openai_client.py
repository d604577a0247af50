"""The one-command local cluster, used as a person would: with the official client."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from cluster_rig import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("local")
    report = directory / "address"
    argv = [sys.executable, "-m", "trtllm_serve", "local", "-c", str(ROOT / "configs" / "local.yaml")]
    argv += ["--model", "tiny", "--port", "0", "--report_addr", str(report), "--run_dir", str(directory / "run")]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:

        def up() -> bool:
            assert process.poll() is None, (directory / "log").read_text()[-4000:]
            return report.exists()

        eventually(up, 90, "local cluster")
        yield report.read_text().strip()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as made:
        yield made


WORDS = "apple river stone house tree blue"


def test_streams_the_words_back(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Repeat: {WORDS}"}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == WORDS
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len(chunks) > 3, "tokens arrive one by one, not in one piece"


def test_completions_and_cached_tokens(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    prompt = "The code of apple is 412. The code of river is 87. The code of stone is 935. The code of tree is 5."
    first, second = (client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0) for _ in "ab")
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens


def test_errors_are_typed(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
