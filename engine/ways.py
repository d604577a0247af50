"""The transceivers of this engine: which of the configured ways to other workers it has, and why not the others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from engine.config import EngineConfig
from kvstore.errors import SettingsError, TransferError
from kvstore.protocol import split_address
from kvstore.transceivers.base import Transceiver
from kvstore.transceivers.shm import SharedPool, ShmTransceiver

log = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.", "::1")


@dataclasses.dataclass(frozen=True, slots=True)
class Ways:
    """By name, in order of preference. `choice` is a sentence for logs and /server_info."""

    transceivers: dict[str, Transceiver]
    choice: str


def needs_shared_pages(config: EngineConfig) -> bool:
    """Whether a configured way has other processes map the pool; private memory has larger pages."""
    return "shm" in config.transfers or "mooncake" in config.transfers


def open_ways(config: EngineConfig, pages: SharedPool, incarnation: str) -> Ways:
    """SettingsError when a way that was asked for by name cannot be had."""
    host = _host(config.endpoint)
    opened: dict[str, Transceiver] = {}
    notes: list[str] = []
    for name in config.transfers:
        if name == "pool":
            continue
        if name == "nixl" and "shm" in opened and not config.transfers_required and _is_loopback(host):
            notes.append(f"nixl is not started: {host} is reached from this host only, where shm is faster")
            continue
        try:
            opened[name] = _OPENERS[name](config, pages, incarnation, host)
        except TransferError as error:
            if config.transfers_required:
                raise SettingsError([("cache_transceiver_config.backend", str(error))]) from None
            notes.append(f"no {name}: {error}")
    order = [name for name in config.transfers if name in opened or name == "pool"]
    choice = f"hand-offs by {', then '.join(order)}" if order else "no hand-offs"
    choice = "; ".join([choice, *notes])
    log.info("%s", choice)
    return Ways(opened, choice)


def _host(endpoint: str) -> str:
    try:
        return split_address(endpoint)[0]
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    return host.startswith(_LOOPBACK)


def _open_shm(config: EngineConfig, pages: SharedPool, incarnation: str, host: str) -> Transceiver:
    return ShmTransceiver(pages.block)


def _open_nixl(config: EngineConfig, pages: SharedPool, incarnation: str, host: str) -> Transceiver:
    from kvstore.transceivers.nixl import NixlTransceiver, available

    if (reason := available()) is not None:
        raise TransferError(reason)
    return NixlTransceiver(pages, incarnation, host, config.transfer_poll_interval)


def _open_mooncake(config: EngineConfig, pages: SharedPool, incarnation: str, host: str) -> Transceiver:
    from kvstore.transceivers.mooncake import MooncakeTransceiver

    return MooncakeTransceiver(pages, incarnation, host)


_OPENERS: dict[str, Callable[[EngineConfig, SharedPool, str, str], Transceiver]] = {
    "shm": _open_shm,
    "nixl": _open_nixl,
    "mooncake": _open_mooncake,
}
