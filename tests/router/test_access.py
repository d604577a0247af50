"""API keys, origins, trace context, signatures, and the routes that answer without a worker."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeWorker
from router_rig import CHAT, COMPLETIONS, cluster
from running_router import RunningRouter

from kvstore.errors import NotAuthenticated, SettingsError
from kvstore.handoff_auth import AUTH_HEADER, handoff_signature, is_signed
from kvstore.hashing import block_keys
from openai_api.tokenizer import Tokenizer
from router.access import ApiKeys

TINY = Path(__file__).parents[1] / "models" / "tiny-chat"
TOKENIZER = Tokenizer.load(str(TINY))


def write(path: Path, text: str) -> None:
    """With a time of change that differs from before."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


class TestApiKeys:
    def test_keys_are_read_again_when_the_file_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.access.LOOK_AGAIN", 0.0)
        file = tmp_path / "keys"
        write(file, "# ours\n\none\n two \n")
        keys = ApiKeys(str(file))
        for good in (b"Bearer one", b"bearer  two "):
            keys.check(good)
        for bad in (b"", b"one", b"Basic one", b"Bearer", b"Bearer # ours", b"Bearer three"):
            with pytest.raises(NotAuthenticated):
                keys.check(bad)
        write(file, "three\n")
        keys.check(b"Bearer three")
        with pytest.raises(NotAuthenticated):
            keys.check(b"Bearer one")
        file.unlink()
        keys.check(b"Bearer three")  # said in the log; locking all out would be worse
        assert "three" not in repr(vars(keys))

    def test_a_file_without_keys_is_a_settings_error(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="api_keys_file"):
            ApiKeys(str(tmp_path / "absent"))
        write(tmp_path / "empty", "# nothing\n")
        with pytest.raises(SettingsError, match="no key"):
            ApiKeys(str(tmp_path / "empty"))

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/explain", "/v1/models"])
    async def test_without_a_key_nothing_is_served(self, tmp_path: Path, path: str) -> None:
        write(tmp_path / "keys", "sesame\n")
        async with cluster(config={"api_keys_file": str(tmp_path / "keys")}) as (router, [ctx], _):
            method = "GET" if path == "/v1/models" else "POST"
            body = {"model": "fake", "prompt": "hi"} if path != CHAT else {"model": "fake", "messages": []}
            for authorization in ({}, {"authorization": "Bearer wrong"}):
                answer = await router.client.request(method, path, json=body, headers=authorization)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key" and not ctx.legs()
            good = {"authorization": "Bearer sesame"}
            answer = await router.client.request(method, path, json=body, headers=good)
            assert answer.status_code == (503 if path == "/tokenize" else 200)
            assert (await router.client.get("/health")).status_code == 200
            if ctx.legs():
                assert "authorization" not in ctx.legs()[0].headers


class TestOrigins:
    async def test_pages_of_allowed_origins_may_read(self) -> None:
        async with cluster(config={"cors_allow_origins": ["https://a.example"]}) as (router, _, _):
            for path in (COMPLETIONS, "/v1/models"):
                for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
                    method, body = ("POST", {"prompt": "hi"}) if path == COMPLETIONS else ("GET", None)
                    answer = await router.client.request(method, path, json=body, headers={"origin": origin})
                    assert answer.status_code == 200
                    assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
            asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
            preflight = await router.client.options(CHAT, headers=asked)
            assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]

    async def test_any_and_none(self) -> None:
        async with cluster(config={"cors_allow_origins": ["*"]}) as (router, _, _):
            body = {"prompt": "hi", "stream": True}
            answer = await router.client.post(COMPLETIONS, json=body, headers={"origin": "https://x"})
            assert answer.headers["access-control-allow-origin"] == "*"
        async with cluster() as (router, _, _):
            answer = await router.client.post(COMPLETIONS, json={"prompt": "hi"}, headers={"origin": "https://x"})
            assert "access-control-allow-origin" not in answer.headers
            assert (await router.client.options(CHAT)).status_code == 405


async def test_trace_context_goes_to_both_legs() -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    async with cluster() as (router, [ctx], [gen]):
        await router.client.post(COMPLETIONS, json={"prompt": "hi"}, headers=trace)
        for leg in (*ctx.legs(), *gen.legs()):
            assert {name: leg.headers.get(name) for name in trace} == trace


class TestSignature:
    def test_it_covers_both_fields_and_the_first_endpoint(self) -> None:
        assert handoff_signature("k", ["a:1", "b:2"], None) == handoff_signature("k", "a:1", None)
        signed = handoff_signature("k", "a:1", "c3RhdGU=")
        assert signed.startswith("sha256=") and len(signed) == 71
        assert is_signed("k", signed, "a:1", "c3RhdGU=")
        for key, endpoint, state in (("x", "a:1", "c3RhdGU="), ("k", "b:1", "c3RhdGU="), ("k", "a:1", None)):
            assert not is_signed(key, signed, endpoint, state)
        assert not is_signed("k", None, "a:1", None) and is_signed("k", None, None, None)

    async def test_the_generation_leg_bears_it(self) -> None:
        async with cluster(config={"internal_request_auth_key": "secret"}) as (router, [ctx], [gen]):
            await router.post(COMPLETIONS, prompt="hi", disaggregated_params={"ctx_info_endpoint": "evil:1"})
            [leg] = gen.legs()
            assert leg.headers[AUTH_HEADER] == handoff_signature("secret", None, "c3RhdGU=")
            assert AUTH_HEADER not in ctx.legs()[0].headers


class TestModelNames:
    """C001"""

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_unknown_name_reaches_no_worker(self, path: str, stream: bool) -> None:
        accepts = {"accepts": ["fake", "/models/fake"]}
        async with cluster(context_info=accepts, generation_info=accepts) as (router, [ctx], [gen]):
            body: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": "hi"}
            answer = await router.client.post(path, json={"model": "no-such-model", "stream": stream, **body})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "model_not_found" and error["param"] == "model" and "fake" in error["message"]
            assert not ctx.legs() and not gen.legs()
            for name in ("fake", "/models/fake"):
                assert (await router.client.post(path, json={"model": name, **body})).status_code == 200
            escaped = json.dumps({"model": "fake", **body}).replace('"fake"', '"f\\u0061ke"')
            assert (await router.client.post(path, content=escaped)).status_code == 200

    async def test_where_a_worker_tells_no_names_it_judges_them(self) -> None:
        async with cluster(context_info={"accepts": ["fake"]}) as (router, [ctx], _):
            assert (await router.client.post(COMPLETIONS, json={"model": "x", "prompt": "p"})).status_code == 200
            assert len(ctx.legs()) == 1

    async def test_one_model(self) -> None:
        async with cluster() as (router, _, _):
            assert (await router.client.get("/v1/models/fake")).json()["id"] == "fake"
            answer = await router.client.get("/v1/models/nope")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.fixture
async def tools() -> AsyncIterator[tuple[RunningRouter, list[FakeWorker]]]:
    config = {"model": str(TINY)}
    info = {"incarnation": "c", "tokens_per_block": 16}
    async with cluster(2, 1, config, context_info=info, tokenizer_path=str(TINY)) as (router, ctx, _):
        yield router, ctx


class TestTools:
    async def test_tokens_there_and_back(self, tools: tuple[RunningRouter, list[FakeWorker]]) -> None:
        router, ctx = tools
        answer = (await router.post("/tokenize", prompt="one two three")).json()
        assert answer == {"count": len(answer["tokens"]), "tokens": TOKENIZER.encode("one two three", True)}
        chat = (await router.post("/tokenize", messages=[{"role": "user", "content": "one"}])).json()
        assert chat["count"] > 1
        back = (await router.post("/detokenize", tokens=TOKENIZER.encode("one two three", False))).json()
        assert back == {"prompt": "one two three"}
        assert not any(worker.legs() for worker in ctx)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": 7}),
            ("/tokenize", {"messages": "x"}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "x"}),
        ],
    )
    async def test_bad_input(
        self, tools: tuple[RunningRouter, list[FakeWorker]], path: str, body: dict[str, Any]
    ) -> None:
        answer = await tools[0].client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

    async def test_explain_shows_all_and_sends_nothing(self, tools: tuple[RunningRouter, list[FakeWorker]]) -> None:
        """C111: what is predicted is what the index says."""
        router, ctx = tools
        cluster_ = router.router.cluster
        ids = list(range(3, 103))
        holder = next(worker for worker in cluster_.workers if worker.port == ctx[1].port)
        assert holder.blocks is not None
        cluster_.index.add(holder.blocks, block_keys(ids, 16))
        told = (await router.post("/explain", prompt=ids)).json()
        assert told["prompt_tokens"] == 100 and told["blocks"] == 6 and told["tokens_per_block"] == 16
        first, second = told["context"]["candidates"]
        assert told["context"]["policy"] == "least_time"
        assert (first["worker"], first["matched_tokens"]) == (ctx[1].address, 96)
        assert second["matched_tokens"] == 0 and first["score"] > second["score"]
        assert told["generation"]["policy"] == "round_robin" and len(told["generation"]["candidates"]) == 1
        assert not any(worker.legs() for worker in ctx) and router.in_flight == 0
        answer = await router.post(COMPLETIONS, prompt=ids)
        assert answer.headers["x-trtllm-context-worker"] == ctx[1].address
        foreign = (await router.post("/explain", messages=[{"role": "user", "content": "x"}], tools=[{}])).json()
        assert "tools" in foreign["not_read"] and foreign["blocks"] == 0
