"""Cluster membership: workers keep a record alive, the router watches the set of records.

    redis://[user:password@]host:port/db, rediss://…   a Redis or Valkey server of the operator
    redis://embedded[:port]                            a private Valkey on 127.0.0.1, started by the launcher or router
    http://host:port, https://…                        storage hosted by the router, at its own address

A record is `/trtllm-disagg/{cluster_name}/workers/{worker_id}` → JSON {worker_id, host, port, role}, with a time to
live that its worker's heartbeat renews. Losing the registry loses no worker: records come with the next heartbeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import SettingsError
from kvstore.protocol import WorkerRecord
from kvstore.registry.address import ALLOWED, Backend, ClusterAddress, parse_cluster_uri
from kvstore.registry.membership import Membership
from kvstore.registry.records import decode_record, encode_record, new_worker_id, record_key
from kvstore.registry.registration import RecordWriter, Registration, RegistryUnavailable

if TYPE_CHECKING:
    from kvstore.registry.http_store import HttpStore

__all__ = [
    "ALLOWED",
    "Backend",
    "ClusterAddress",
    "Membership",
    "RecordWriter",
    "Registration",
    "RegistryUnavailable",
    "decode_record",
    "encode_record",
    "new_worker_id",
    "open_membership",
    "parse_cluster_uri",
    "record_key",
    "register_worker",
]


def register_worker(
    cluster_uri: str, cluster_name: str, record: WorkerRecord, heartbeat_interval: float, ttl: float
) -> Registration:
    """The worker's side. Nothing is sent before `start()`; call that once the worker answers requests.

    `heartbeat_interval` and `ttl` in seconds. SettingsError for an address that a worker cannot join, or unless
    0 < heartbeat_interval < ttl.
    """
    if not 0 < heartbeat_interval < ttl:
        problem = f"{heartbeat_interval:g} must be above 0 and below inactive_timeout_sec ({ttl:g})"
        raise SettingsError([("disagg_cluster.heartbeat_interval_sec", problem)])
    address = parse_cluster_uri(cluster_uri)
    if address.backend is Backend.EMBEDDED and address.port is None:
        raise SettingsError(
            [
                (
                    "disagg_cluster.cluster_uri",
                    "redis://embedded is an address only for the process that starts it: give a worker the address "
                    "which that process prints, or fix the port for all with redis://embedded:PORT",
                )
            ]
        )
    writer: RecordWriter
    if address.backend is Backend.HTTP:
        from kvstore.registry.http_client import HttpRecordWriter

        writer = HttpRecordWriter(address.url, cluster_name, record, ttl)
    else:
        from kvstore.registry.redis_registry import RedisRecordWriter

        writer = RedisRecordWriter(address.url, cluster_name, record, ttl)
    return Registration(writer, record, heartbeat_interval)


def open_membership(
    cluster_uri: str, cluster_name: str, store: HttpStore | None = None, grace: float = 10.0
) -> Membership:
    """The router's side. Resources: close it with `aclose()`.

    `store`: for http(s) addresses, the storage that this process serves (`http_store.storage_routes`).
    `grace`: seconds for which workers stay in the view after the registry lost its data or was away, so that they can
    register again; use the workers' time to live.
    With redis://embedded the Valkey is started here, in this thread, and ends with `aclose()`; see `Membership.uri`.
    """
    address = parse_cluster_uri(cluster_uri)
    if address.backend is Backend.HTTP:
        from kvstore.registry.http_store import HttpMembership

        if store is None:
            raise SettingsError([("disagg_cluster.cluster_uri", f"{address}: needs the storage of this router")])
        return HttpMembership(address.url, cluster_name, store)
    from kvstore.registry.redis_registry import RedisMembership

    if address.backend is Backend.REDIS:
        return RedisMembership(address.url, cluster_name, grace)
    from kvstore.registry.embedded import EmbeddedValkey

    valkey = EmbeddedValkey(port=address.port)
    valkey.start()
    return RedisMembership(valkey.uri, cluster_name, grace, owned=valkey)
