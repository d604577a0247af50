"""With `internal_request_auth_key`, hand-off parameters are taken from the router alone."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, script
from http_worker import client_of, completion, make_app

from kvstore.errors import SettingsError
from kvstore.handoff_auth import AUTH_HEADER, handoff_signature
from trtllm_serve.settings import load_settings

STATE = "bm90IGEgaGFuZGxl"


async def post(params: dict[str, Any], signature: str | None) -> tuple[int, str]:
    engine = FakeEngine(script([72]))
    headers = {} if signature is None else {AUTH_HEADER: signature}
    async with client_of(make_app(engine, "generation", internal_request_auth_key="key")) as client:
        body = completion(disaggregated_params={"request_type": "generation_only", **params})
        answer = await client.post("/v1/completions", json=body, headers=headers)
    return answer.status_code, answer.text


@pytest.mark.parametrize("signature", [None, "sha256=00", handoff_signature("other", None, STATE)])
async def test_unsigned_parameters_are_refused(signature: str | None) -> None:
    status, text = await post({"encoded_opaque_state": STATE}, signature)
    assert status == 400 and AUTH_HEADER in text and "key" not in text.replace("server's key", "")


async def test_signed_ones_are_read() -> None:
    _, text = await post({"encoded_opaque_state": STATE}, handoff_signature("key", None, STATE))
    assert AUTH_HEADER not in text and "encoded_opaque_state" in text  # the handle itself is what is wrong


def test_the_key_is_a_setting_of_the_file_and_is_never_shown(tmp_path: Any) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("internal_request_auth_key: s3cret\n")
    assert load_settings("tiny", config=str(file)).internal_request_auth_key == "s3cret"
    file.write_text("internal_request_auth_key: [s3cret]\n")
    with pytest.raises(SettingsError) as caught:
        load_settings("tiny", config=str(file))
    assert "s3cret" not in str(caught.value)
