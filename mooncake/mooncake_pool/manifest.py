"""The pool manifest: the JSON file by which servers find a master whose host the scheduler chose."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from kvstore.protocol import split_address
from mooncake_pool.net import rdma_devices

MANIFEST_NAME = "pool.json"
LAST_MANIFEST_NAME = "pool.last.json"
P2P_HANDSHAKE = "P2PHANDSHAKE"
PROTOCOLS = ("rdma", "tcp")
POLL_SECONDS = 0.5


class Manifest(msgspec.Struct, frozen=True):
    """`extra` holds the keys that this version does not know; they are written back as they were read."""

    master_server_address: str  # host:port
    metadata_server: str = P2P_HANDSHAKE
    protocol: str = "rdma"
    namespace: str = "trtllm"
    metrics_port: int = 9004
    eviction_ratio: float = 0.05
    extra: dict[str, Any] = {}

    @property
    def master(self) -> tuple[str, int]:
        return split_address(self.master_server_address)


_KNOWN = tuple(name for name in Manifest.__struct_fields__ if name != "extra")


def decode_manifest(text: str | bytes, source: str = "pool manifest") -> Manifest:
    """ValueError names `source`, the key, its value and what is allowed."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source}: a JSON object is needed, not {type(content).__name__}")
    if not content.get("master_server_address"):
        raise ValueError(f"{source}: master_server_address is missing or empty (host:port)")
    known = {name: content[name] for name in _KNOWN if name in content}
    known["extra"] = {name: value for name, value in content.items() if name not in _KNOWN}
    try:
        manifest = msgspec.convert(known, Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{source}: {error}") from None
    _check(manifest, source)
    return manifest


def _check(manifest: Manifest, source: str) -> None:
    try:
        _ = manifest.master
    except ValueError as error:
        raise ValueError(f"{source}: master_server_address: {error}") from None
    if manifest.protocol not in PROTOCOLS:
        raise ValueError(f"{source}: protocol: {manifest.protocol!r} is not one of {', '.join(PROTOCOLS)}")
    if not manifest.namespace:
        raise ValueError(f"{source}: namespace is empty")


def encode_manifest(manifest: Manifest) -> str:
    content = {name: getattr(manifest, name) for name in _KNOWN} | manifest.extra
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_manifest(path: Path) -> Manifest:
    """OSError when it cannot be read, ValueError when it makes no sense."""
    return decode_manifest(path.read_bytes(), str(path))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_manifest(path: Path, manifest: Manifest) -> None:
    write_atomically(path, encode_manifest(manifest))


def manifest_of_reference(pool: str) -> Manifest:
    """One try at `mooncake_store.pool`: file://<manifest> is read, host:port stands for itself.

    An address alone does not tell the transport: RDMA where this host has an active device, else TCP.
    """
    if pool.startswith("file://"):
        return read_manifest(Path(pool.removeprefix("file://")))
    try:
        split_address(pool)
    except ValueError as error:
        raise ValueError(f"mooncake_store.pool: {error}; use file://<manifest> or host:port") from None
    return Manifest(master_server_address=pool, protocol="rdma" if rdma_devices() else "tcp")


def resolve_pool(pool: str, timeout: float, stop: threading.Event | None = None) -> Manifest:
    """The manifest that `pool` names, waiting up to `timeout` seconds for its file.

    TimeoutError when it does not appear (or stays unreadable) in time, or when `stop` is set meanwhile.
    """
    if not pool.startswith("file://"):
        return manifest_of_reference(pool)
    stop = stop or threading.Event()
    deadline = time.monotonic() + (timeout if math.isfinite(timeout) else threading.TIMEOUT_MAX)
    while True:
        try:
            return manifest_of_reference(pool)
        except (OSError, ValueError) as error:
            reason = str(error)
        left = deadline - time.monotonic()
        if left <= 0 or stop.wait(min(POLL_SECONDS, left)):
            raise TimeoutError(f"no pool manifest after {timeout:.3g} s: {reason}")
