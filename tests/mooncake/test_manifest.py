from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_pool import manifest as m
from mooncake_pool.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    resolve_pool,
    write_manifest,
)


def test_text_is_upstreams() -> None:
    assert encode_manifest(Manifest("10.0.0.5:50051", protocol="tcp")) == (
        "{\n"
        '  "eviction_ratio": 0.05,\n'
        '  "master_server_address": "10.0.0.5:50051",\n'
        '  "metadata_server": "P2PHANDSHAKE",\n'
        '  "metrics_port": 9004,\n'
        '  "namespace": "trtllm",\n'
        '  "protocol": "tcp"\n'
        "}\n"
    )


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name not in Manifest.__struct_fields__),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4),
        max_size=4,
    )
)
def test_unknown_keys_survive(extra: dict[str, object]) -> None:
    text = json.dumps({"master_server_address": "h:1", "namespace": "n"} | extra)
    again = decode_manifest(encode_manifest(decode_manifest(text)))
    assert again.extra == extra and again.namespace == "n"


def test_a_key_named_extra_survives_too() -> None:
    text = '{"master_server_address": "h:1", "extra": {"a": 1}}'
    assert decode_manifest(encode_manifest(decode_manifest(text))).extra == {"extra": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object is needed, not list"),
        ("{}", "master_server_address is missing"),
        ('{"master_server_address": ""}', "master_server_address is missing"),
        ('{"master_server_address": "nowhere"}', "'nowhere' is not host:port"),
        ('{"master_server_address": "h:1", "protocol": "ucx"}', "'ucx' is not one of rdma, tcp"),
        ('{"master_server_address": "h:1", "metrics_port": "x"}', "metrics_port"),
        ('{"master_server_address": "h:1", "namespace": ""}', "namespace is empty"),
    ],
)
def test_bad_manifests_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="here: ") as error:
        decode_manifest(text, "here")
    assert said in str(error.value)


def test_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    write_manifest(path, Manifest("h:1"))
    assert read_manifest(path) == Manifest("h:1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["pool.json"]


def test_resolve_waits_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "POLL_SECONDS", 0.01)
    path = tmp_path / "pool.json"
    path.write_text("{")  # being written by something that does not rename
    timer = threading.Timer(0.1, write_manifest, (path, Manifest("h:1")))
    timer.start()
    try:
        assert resolve_pool(f"file://{path}", 5.0).master == ("h", 1)
    finally:
        timer.join()


def test_resolve_gives_up_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no pool manifest after 0\.05 s: .*No such file"):
        resolve_pool(f"file://{tmp_path}/none.json", 0.05)


def test_resolve_stops_when_told(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        resolve_pool(f"file://{tmp_path}/none.json", 30.0, stop)
    assert time.monotonic() - begun < 1


def test_an_address_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "rdma_devices", lambda: [])
    assert resolve_pool("10.0.0.5:50051", 1.0) == Manifest("10.0.0.5:50051", protocol="tcp")
    monkeypatch.setattr(m, "rdma_devices", lambda: ["mlx5_0"])
    assert resolve_pool("10.0.0.5:50051", 1.0).protocol == "rdma"
    with pytest.raises(ValueError, match=r"mooncake_store\.pool: '/tmp/pool\.json' is not host:port; use file://"):
        resolve_pool("/tmp/pool.json", 1.0)
