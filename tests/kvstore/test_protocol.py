"""The wire: addresses, numbers that travel, and what is left out of messages."""

from __future__ import annotations

import ipaddress
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors, protocol
from kvstore.protocol import (
    DisaggregatedParams,
    Fingerprint,
    KvEvent,
    KvEventBatch,
    ScheduleStyle,
    ServerInfo,
    ServerRole,
    WorkerRecord,
    join_address,
    split_address,
)

FINGERPRINT = Fingerprint("m", "t", "float32", "block_nhd", 32, 8, 2, 32, 1)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:80", "localhost", 80),
        (" 10.0.0.1:8001 ", "10.0.0.1", 8001),
        ("http://h:1", "h", 1),
        ("http://h:1/", "h", 1),
        ("[::1]:65535", "::1", 65535),
        ("http://[fe80::1]:80/", "fe80::1", 80),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "h:",
        ":1",
        "h:0",
        "h:65536",
        "h:-1",
        "h:x",
        "h:1.5",
        "::1",
        "::1:80",
        "[::1]",
        "[nonsense]:80",
        "h:²",
        "https://h:1",
        "u@h:1",
        "h/p:1",
        "a b:1",
    ],
)
def test_what_is_no_address_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_address(text)
    assert repr(text) in str(caught.value)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_addresses_round_trip(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    assert split_address(join_address(str(address), port)) == (str(address), port)


def test_brackets_are_not_doubled() -> None:
    assert join_address("[::1]", 80) == join_address("::1", 80) == "[::1]:80"


def test_numbers_that_travel_are_upstreams() -> None:
    roles = {role.name: role.value for role in ServerRole if role is not ServerRole.AGGREGATED}
    assert roles == {"CONTEXT": 0, "GENERATION": 1, "MM_ENCODER": 2, "VISUAL_GEN": 3, "EMBEDDING": 4}
    assert (ScheduleStyle.CONTEXT_FIRST, ScheduleStyle.GENERATION_FIRST) == (0, 1)
    assert msgspec.json.encode({"s": ScheduleStyle.GENERATION_FIRST, "r": ServerRole.GENERATION}) == b'{"s":1,"r":1}'


def test_unset_fields_are_never_sent() -> None:
    """Workers of other makes refuse fields that they do not know."""
    params = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    assert json.loads(msgspec.json.encode(params)) == {
        "request_type": "context_only",
        "disagg_request_id": 2199023255552,
    }
    assert msgspec.json.encode(ServerInfo()) == b"{}"
    assert msgspec.json.encode(KvEvent()) == b"{}"


def test_unknown_fields_are_ignored() -> None:
    assert msgspec.json.decode(b'{"request_type": "x", "new": 1}', type=DisaggregatedParams).request_type == "x"
    info = msgspec.json.decode(b'{"max_batch_size": 4, "fingerprint": null, "later": []}', type=ServerInfo)
    assert info.max_batch_size == 4 and info.fingerprint is None


def test_event_keys_travel_as_text() -> None:
    batch = KvEventBatch("i", 7, [KvEvent(stored=[b"\x00\xff" * 8], removed=[b"x" * 16]), KvEvent(cleared=True)])
    line = msgspec.json.encode(batch)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=KvEventBatch) == batch


def test_records_have_an_address() -> None:
    assert WorkerRecord("w", "::1", 80, 0).address == "[::1]:80"
    assert protocol.worker_key_prefix("c") == "/trtllm-disagg/c/workers/"
    assert protocol.worker_key_prefix("") == "/trtllm-disagg//workers/"


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_every_field_of_a_fingerprint_counts(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = msgspec.structs.replace(FINGERPRINT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest() != FINGERPRINT.digest()
    [line] = FINGERPRINT.differences(other)
    assert line.startswith(field + ": ") and str(value) in line and str(getattr(other, field)) in line


def test_equal_fingerprints_have_equal_digests() -> None:
    copy = msgspec.json.decode(msgspec.json.encode(FINGERPRINT), type=Fingerprint)
    assert copy.digest() == FINGERPRINT.digest() and FINGERPRINT.differences(copy) == []
    assert len(FINGERPRINT.digest()) == 32


def test_the_error_tree_is_what_its_table_says() -> None:
    table = errors.__doc__ or ""
    classes = set(errors.SERVING_ERRORS.values())
    assert {cls.code for cls in classes} == set(errors.SERVING_ERRORS)
    for cls in classes:
        [row] = [line for line in table.splitlines() if line.lstrip("│├└─ ").startswith(cls.__name__ + " ")]
        words = row.lstrip("│├└─ ").split()
        assert words == [cls.__name__, str(cls.status), cls.type, cls.code, "yes" if cls.retryable else "no"]


def test_error_bodies_have_the_four_keys() -> None:
    body = errors.openai_error_body(errors.InvalidRequest("m", param="p"))
    assert body == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": body["error"]["code"]}
    }
    assert set(errors.openai_error_body(errors.NotReady("m"))["error"]) == {"message", "type", "param", "code"}


def test_settings_errors_list_all_problems() -> None:
    assert str(errors.SettingsError([("a", "x"), ("b", "y")])) == "a: x\nb: y"
