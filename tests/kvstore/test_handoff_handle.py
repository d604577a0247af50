from __future__ import annotations

import base64

import msgspec
import pytest

from kvstore.errors import InvalidRequest
from kvstore.handoff import HANDLE_VERSION, Handle, SharedMemory, StartState, prompt_digest


def handle(**changes: object) -> Handle:
    fields: dict[str, object] = {
        "version": HANDLE_VERSION,
        "handoff_id": 1 << 41,
        "incarnation": "abc",
        "fingerprint": "f" * 32,
        "endpoint": "h:1",
        "prompt_tokens": 33,
        "block_ids": [3, 4],
        "generations": [1, 9],
        "starts": [StartState(index=0, token=7, seed=1, logprob=-0.5, top_logprobs=[(7, -0.5)])],
        "shared_memory": SharedMemory(host_id="b", pid=1, fd=2, size=3),
    }
    return msgspec.convert(fields | changes, Handle)


def test_round_trip() -> None:
    original = handle()
    assert Handle.decode(original.encode()) == original


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        base64.b64encode(b"\x00").decode(),
        handle().encode()[:40],
        handle(version=HANDLE_VERSION + 1).encode(),
        handle(generations=[1]).encode(),
        handle(starts=[]).encode(),
        handle(prompt_tokens=0).encode(),
        "A" * (9 * 1024 * 1024),
    ],
)
def test_anything_else_is_an_error_that_names_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="encoded_opaque_state") as caught:
        Handle.decode(text)
    assert caught.value.param == "disaggregated_params.encoded_opaque_state"


def test_prompt_digest_sees_every_token_and_the_salt() -> None:
    assert prompt_digest([1, 2, 3]) == prompt_digest([1, 2, 3])
    assert (
        len({prompt_digest([1, 2, 3]), prompt_digest([1, 2, 4]), prompt_digest([1, 2]), prompt_digest([1, 2], "s")})
        == 4
    )
