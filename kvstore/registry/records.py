"""Registry records: names, bytes, and which of several records of one address counts. Pure."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterable

import msgspec

from kvstore.protocol import ServerRole, WorkerRecord, worker_key_prefix

_STARTED = re.compile(r"-(\d{10,})-\d+-\d{3,4}$")


def new_worker_id(role: ServerRole, host: str, port: int) -> str:
    """`{ROLE}-{host}:{port}-{epoch_ms}-{pid}-{000..1000}`: another one for each start of a worker."""
    return f"{role.name}-{host}:{port}-{time.time_ns() // 1_000_000}-{os.getpid()}-{random.randint(0, 1000):03}"


def record_key(cluster_name: str, worker_id: str) -> str:
    return worker_key_prefix(cluster_name) + worker_id


def encode_record(record: WorkerRecord) -> str:
    """Upstream's text to the byte, spaces included."""
    return json.dumps(msgspec.structs.asdict(record))


def decode_record(key: str, value: str | bytes) -> WorkerRecord:
    """ValueError says what is wrong with the record under `key`."""
    try:
        record = msgspec.json.decode(value, type=WorkerRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a worker record: {error}") from None
    if not key.endswith("/" + record.worker_id):
        raise ValueError(f"holds the record of {record.worker_id!r}")
    if not record.host or not 0 < record.port < 65536:
        raise ValueError(f"no address: host {record.host!r}, port {record.port}")
    if record.role not in set(ServerRole):
        raise ValueError(f"role {record.role}: not one of {[int(role) for role in ServerRole]}")
    return record


def newest_per_address(records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Sorted by worker id. A port has one owner, so of two records of one address the older is of a dead worker."""
    newest: dict[tuple[int, str, int], WorkerRecord] = {}
    for record in sorted(records, key=_age):
        newest[record.role, record.host, record.port] = record
    return sorted(newest.values(), key=lambda record: record.worker_id)


def _age(record: WorkerRecord) -> tuple[int, str]:
    started = _STARTED.search(record.worker_id)
    return int(started[1]) if started else 0, record.worker_id
