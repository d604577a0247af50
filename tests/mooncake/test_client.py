from __future__ import annotations

import importlib
import mmap
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_pool import client
from mooncake_pool.client import Outcome, StoreHandle, StoreSettings, StoreUnavailable, outcome_of
from mooncake_pool.lending import address_of


class Vendor:
    """Stands for module mooncake.store; the real one ends the process where this one raises."""

    def __init__(self, setup_code: int = 0) -> None:
        self.setup_code = setup_code
        self.mount_code = 0
        self.mapped_at = 0
        self.arguments: tuple[Any, ...] = ()
        self.calls: list[str] = []
        self.health = 0

    def MooncakeDistributedStore(self) -> Vendor:
        return self

    def setup(self, *arguments: Any) -> int:
        self.arguments = arguments
        return self.setup_code

    def mount_segment(self, path: str, size: int, *_: Any) -> dict[str, Any]:
        with open(path, "r+b") as file:
            self.mapping = mmap.mmap(file.fileno(), size)
        self.mapped_at = address_of(self.mapping)
        return {"ret": self.mount_code, "segment_ids": ["1-2"]}

    def health_check(self) -> int:
        return self.health

    def close(self) -> None:
        self.calls.append("close")

    def register_buffer(self, _address: int, length: int) -> int:
        return -600 if length == 0 else 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [{"there": 1, "gone": 0, "down": -900}[key] for key in keys]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        assert len(keys) == len(addresses) == len(sizes)
        return [{"there": 64, "gone": -704, "down": -900}[key] for key in keys]


@pytest.fixture
def master() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Vendor:
    fake = Vendor()
    monkeypatch.setattr(client, "load_vendor", lambda _protocol: fake)
    return fake


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.OK),
        (1048640, Outcome.OK),
        (-200, Outcome.NO_SPACE),
        (-703, Outcome.MISS),
        (-704, Outcome.MISS),
        (-705, Outcome.PRESENT),
        (-707, Outcome.MISS),
        (-800, Outcome.TRANSFER_FAILED),
        (-801, Outcome.TRANSFER_FAILED),
        (-900, Outcome.MASTER_GONE),
        (-901, Outcome.MASTER_GONE),
        (-1010, Outcome.MASTER_GONE),
        (-1100, Outcome.REFUSED),
        (-600, Outcome.REFUSED),
        (-1, Outcome.REFUSED),
    ],
)
def test_codes(code: int, outcome: Outcome) -> None:
    assert outcome_of(code) is outcome


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"metadata_server": "redis://127.0.0.1:6379"}, "would abort the process"),
        ({"protocol": "ucx"}, "'ucx' is not one of tcp, rdma"),
        ({"segment_size": 8 * 1024 * 1024}, "8388608 is neither 0 nor at least 16777216"),
        ({"master_address": "here"}, "'here' is not host:port"),
    ],
)
def test_settings_that_the_vendor_does_not_survive(vendor: Vendor, changed: dict[str, Any], said: str) -> None:
    settings = {"master_address": "127.0.0.1:1", "local_hostname": "127.0.0.1"} | changed
    with pytest.raises(StoreUnavailable, match=said):
        StoreHandle.open(StoreSettings(**settings))
    assert vendor.arguments == ()


def test_no_setup_without_a_master(vendor: Vendor, master: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=f"no master at {address}"):
            StoreHandle.open(StoreSettings(address, "127.0.0.1"))
    assert vendor.arguments == ()


def test_setup_arguments_and_failure(vendor: Vendor, master: str) -> None:
    StoreHandle.open(StoreSettings(master, "127.0.0.1", protocol="rdma", devices="mlx5_0", segment_size=1 << 24))
    assert vendor.arguments == ("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 0, "rdma", "mlx5_0", master)
    store = StoreHandle.open(StoreSettings(master, "127.0.0.1", segment_size=1 << 24))
    assert vendor.arguments == ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)  # mounted as shared memory
    assert store.lent is not None and store.lent.base == vendor.mapped_at and vendor.mapped_at % 4096 == 0
    vendor.setup_code = -1
    with pytest.raises(StoreUnavailable, match="gave -1; is an RDMA device active"):
        StoreHandle.open(StoreSettings(master, "127.0.0.1", protocol="rdma"))


def test_a_segment_that_cannot_be_mounted(vendor: Vendor, master: str) -> None:
    vendor.mount_code = -101
    with pytest.raises(StoreUnavailable, match="mount_segment of 16777216 bytes gave -101"):
        StoreHandle.open(StoreSettings(master, "127.0.0.1", segment_size=1 << 24))


def test_results_are_typed(vendor: Vendor, master: str) -> None:
    store = StoreHandle.open(StoreSettings(master, "127.0.0.1"))
    assert store.contains(["there", "gone", "down"]) == [Outcome.OK, Outcome.MISS, Outcome.MASTER_GONE]
    assert store.get_into(["there", "gone"], [1, 2], 64) == [(Outcome.OK, 64), (Outcome.MISS, 0)]
    with pytest.raises(StoreUnavailable, match="register_buffer of 0 bytes gave -600"):
        store.register(1, 0)


@pytest.mark.parametrize("key", ["", "a,b", "a&b", "a?b", "a\nb"])
def test_keys_that_break_the_masters_listings(vendor: Vendor, master: str, key: str) -> None:
    store = StoreHandle.open(StoreSettings(master, "127.0.0.1"))
    with pytest.raises(ValueError, match="store key"):
        store.contains([key])


def test_nothing_is_called_after_close(vendor: Vendor, master: str) -> None:
    store = StoreHandle.open(StoreSettings(master, "127.0.0.1"))
    assert store.close() and store.close()
    assert vendor.calls == ["close"]
    for call in (
        lambda: store.contains(["there"]),
        lambda: store.get_into(["there"], [1], 64),
        lambda: store.put_from(["there"], [1], 64),
        lambda: store.register(1, 1),
        store.segment_name,
        store.master_answers,
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


def test_close_does_not_wait_for_a_dead_master(vendor: Vendor, master: str) -> None:
    store = StoreHandle.open(StoreSettings(master, "127.0.0.1"))
    vendor.health = 2
    assert store.close() is False
    assert vendor.calls == []


def test_the_vendor_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.delenv("MC_FORCE_HCA", raising=False)
    with pytest.raises(StoreUnavailable, match=r"libibverbs\.so\.1.*extra `cpu`.*apt-get install libibverbs1"):
        client.load_vendor("tcp")
    assert "MC_FORCE_HCA" not in os.environ
    with pytest.raises(StoreUnavailable):
        client.load_vendor("rdma")
    assert os.environ.pop("MC_FORCE_HCA") == "1"
