"""The `mooncake_store` block: what is wrong with it, what it becomes, and the files that tell others.

Precedence: the file that an inherited MOONCAKE_CONFIG_PATH names, key by key, over the YAML block over the pool's
manifest over the defaults. The file is vLLM's mooncake.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvstore.errors import SettingsError
from mooncake_pool.blockstore import key_part
from mooncake_pool.client import MIN_SEGMENT_BYTES, StoreSettings
from mooncake_pool.manifest import Manifest, manifest_of_reference, write_atomically
from mooncake_pool.net import rdma_devices, routed_address
from mooncake_pool.segments import start_ticks, this_machine

log = logging.getLogger("mooncake_pool")

ROLES = ("both", "producer", "consumer", "capacity")
CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
LOCAL_BUFFER_SIZE = 1073741824
"""What mooncake.json says for clients that copy through such a buffer; ours has none."""


class PoolSettings(Protocol):
    """The `mooncake_store` block, resolved."""

    @property
    def pool(self) -> str: ...
    @property
    def model_key(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def segment_size(self) -> int: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def transfer_batch_size(self) -> int: ...
    @property
    def local_hostname(self) -> str | None: ...
    @property
    def run_dir(self) -> str | None: ...
    @property
    def master_timeout(self) -> float: ...


class EffectiveSettings(msgspec.Struct, frozen=True):
    """PoolSettings after the inherited file was laid over them. The last three: None leaves it to the manifest."""

    pool: str
    model_key: str = ""
    role: str = "both"
    segment_size: int = 256 * 1024 * 1024
    namespace: str | None = None
    transfer_batch_size: int = 64
    local_hostname: str | None = None
    run_dir: str | None = None
    master_timeout: float = 60.0
    metadata_server: str | None = None
    protocol: str | None = None
    device_name: str | None = None


_FILE_KEYS = {
    "master_server_address": "pool",
    "metadata_server": "metadata_server",
    "protocol": "protocol",
    "device_name": "device_name",
    "global_segment_size": "segment_size",
    "role": "role",
    "namespace": "namespace",
    "transfer_batch_size": "transfer_batch_size",
    "local_hostname": "local_hostname",
    "model_key": "model_key",
}
_UNUSED_KEYS = ("local_buffer_size", "stage_through_host", "tenant_id")


def effective_settings(config: PoolSettings, environment: dict[str, str] | None = None) -> EffectiveSettings:
    """SettingsError naming file, key and value for an inherited file that makes no sense."""
    names = [field for field in EffectiveSettings.__struct_fields__ if hasattr(config, field)]
    settings = EffectiveSettings(**{name: getattr(config, name) for name in names})
    path = (os.environ if environment is None else environment).get(CONFIG_PATH)
    if not path:
        return settings
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError([(CONFIG_PATH, f"{path}: {error}")]) from None
    if not isinstance(content, dict):
        raise SettingsError([(CONFIG_PATH, f"{path}: a JSON object is needed")])
    given = {key: value for key, value in content.items() if value not in ("", None)}
    changed = {_FILE_KEYS[key]: value for key, value in given.items() if key in _FILE_KEYS}
    ignored = sorted(set(content) - set(_FILE_KEYS) - set(_UNUSED_KEYS))
    log.info("%s=%s overrides mooncake_store: %s", CONFIG_PATH, path, ", ".join(sorted(changed)) or "nothing")
    if ignored:
        log.warning("%s: keys that are not known and do nothing: %s", path, ", ".join(ignored))
    if "segment_size" in changed:
        changed["segment_size"] = bytes_of(changed["segment_size"], f"{path}: global_segment_size")
    try:
        return msgspec.convert(msgspec.structs.asdict(settings) | changed, EffectiveSettings)
    except msgspec.ValidationError as error:
        raise SettingsError([(CONFIG_PATH, f"{path}: {error}")]) from None


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(value: Any, path: str = "mooncake_store.segment_size") -> int:
    """An int, its digits, or a number with KiB, MiB, GiB or TiB. GB and the like are refused as ambiguous."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.isdecimal():
            return int(text)
        number, unit = text[:-3].strip(), text[-3:]
        with contextlib.suppress(ValueError):
            if unit in _UNITS and number.isascii():
                size = float(number) * _UNITS[unit]
                if size >= 0 and size.is_integer():
                    return int(size)
    raise SettingsError([(path, f"{value!r} is neither a number of bytes nor one of KiB, MiB, GiB, TiB (1024-based)")])


def check_settings(config: PoolSettings, prefix: str) -> None:
    """SettingsError with everything that is wrong; a pool that is only absent is not."""
    problems = []
    if config.role not in ROLES:
        problems.append(("mooncake_store.role", f"{config.role!r} is not one of {', '.join(ROLES)}"))
    if config.segment_size and config.segment_size < MIN_SEGMENT_BYTES:
        problems.append(
            ("mooncake_store.segment_size", f"{config.segment_size} bytes: 0 or at least {MIN_SEGMENT_BYTES} (16 MiB)")
        )
    if config.transfer_batch_size < 1:
        problems.append(("mooncake_store.transfer_batch_size", f"{config.transfer_batch_size} is less than 1"))
    if not config.master_timeout > 0:
        problems.append(("mooncake_store.master_timeout", f"{config.master_timeout} s is not positive"))
    if not config.pool.startswith("file://"):
        try:
            manifest_of_reference(config.pool)
        except ValueError as error:
            problems.append(("mooncake_store.pool", str(error).removeprefix("mooncake_store.pool: ")))
    if not prefix or prefix != key_part(prefix):
        problems.append(
            ("mooncake_store.model_key", f"{prefix!r} is empty or has characters that a pool key cannot have")
        )
    problems += memory_problem(config.segment_size)
    if problems:
        raise SettingsError(problems)


def memory_problem(segment_size: int, ranks: int = 1, total: int | None = None) -> list[tuple[str, str]]:
    """What is wrong with `ranks` segments on this node, if its RAM (or its control group's limit) is less."""
    total = node_memory() if total is None else total
    asked = segment_size * ranks
    if not total or asked <= total:
        return []
    said = f"{segment_size} bytes x {ranks} rank(s) = {asked} bytes, and this node has {total} bytes of memory"
    return [("mooncake_store.segment_size", said)]


def node_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM, or the limit of the control group where that is less; 0 when it is not known."""
    try:
        kib = int((root / "proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    limits = [kib * 1024]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((root / name).read_text()))
    return min(limits)


def store_settings(config: PoolSettings, manifest: Manifest) -> StoreSettings:
    protocol = getattr(config, "protocol", None) or manifest.protocol
    devices = getattr(config, "device_name", None)
    host, _ = manifest.master
    return StoreSettings(
        master_address=manifest.master_server_address,
        local_hostname=config.local_hostname or routed_address(host),
        metadata_server=getattr(config, "metadata_server", None) or manifest.metadata_server,
        protocol=protocol,
        devices=devices or (",".join(rdma_devices()) if protocol == "rdma" else ""),
        segment_size=config.segment_size,
    )


class RunDir:
    """owner.json and mooncake.json of one worker in its run_dir.

    Workers may share a run_dir (one host's workers and their master do): the second and later ones use
    owner.<pid>.json and mooncake.<pid>.json, so that nobody writes another's file.
    """

    def __init__(self, owner: Path | None) -> None:
        self._owner = owner

    @classmethod
    def claim(cls, config: PoolSettings) -> RunDir:
        if not config.run_dir:
            return cls(None)
        folder = Path(config.run_dir)
        content = {
            "host": config.local_hostname or routed_address(),
            "pid": os.getpid(),
            "role": config.role,
            "machine": this_machine(),
            "pid_start": start_ticks(os.getpid()) or 0,
            "started": time.time(),
        }
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("owner.json", f"owner.{os.getpid()}.json"):
                if _create(folder / name, text):
                    return cls(folder / name)
        except OSError as error:
            log.warning("run_dir %s cannot be written, no records will be there: %s", folder, error)
        return cls(None)

    def write_config(self, config: PoolSettings, manifest: Manifest, store: StoreSettings) -> None:
        """mooncake.json as other Mooncake clients of this run read it; failures only warn."""
        if self._owner is None:
            return
        content = {
            "master_server_address": store.master_address,
            "metadata_server": store.metadata_server,
            "protocol": store.protocol,
            "device_name": store.devices,
            "global_segment_size": store.segment_size,
            "local_buffer_size": LOCAL_BUFFER_SIZE,
            "role": config.role,
            "namespace": config.namespace or manifest.namespace,
            "transfer_batch_size": config.transfer_batch_size,
            "stage_through_host": True,
            "local_hostname": store.local_hostname,
            "model_key": config.model_key,
        }
        path = self._owner.with_name(self._owner.name.replace("owner", "mooncake", 1))
        try:
            write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            with contextlib.suppress(OSError):
                owner.unlink()


def _create(path: Path, text: str) -> bool:
    """False when a live process has it; one whose process is gone is taken over."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        if _owner_lives(path):
            return False
        write_atomically(path, text)
        return True
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def _owner_lives(path: Path) -> bool:
    """True too when it cannot be told: the owner is on another machine, or has written nothing yet."""
    try:
        content = json.loads(path.read_bytes())
        if content["machine"] != this_machine():
            return True
        return bool(start_ticks(content["pid"]) == content["pid_start"] and content["pid"] != os.getpid())
    except (OSError, ValueError, KeyError, TypeError):
        return True
