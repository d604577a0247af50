"""What workers publish of themselves in Valkey: their KV events, as the router would read them, and their leases."""

from __future__ import annotations

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import complete, eventually

from kvstore.hashing import block_keys
from kvstore.registry.kv_plane import Gap, KvPlaneReader

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


def held(reader: KvPlaneReader, index: dict[str, set[bytes]]) -> dict[str, set[bytes]]:
    """By worker id, after all that has come."""
    for item in reader.poll(0.1):
        if isinstance(item, Gap):
            index.pop(item.worker_id, None)
            continue
        worker_id, batch = item
        for event in batch.events:
            keys = index.setdefault(worker_id, set())
            if event.cleared:
                keys.clear()
            keys.difference_update(event.removed)
            keys.update(event.stored)
    return index


def test_events_and_leases(shm_pair: Pair) -> None:
    reader = KvPlaneReader(shm_pair.cluster.registry_uri, "")
    index: dict[str, set[bytes]] = {}
    eventually(lambda: len(held(reader, index)) == 2, 10, "both workers are seen")
    body = {"model": "tiny", "prompt": [9] * 100, "max_tokens": 4, "temperature": 0}
    assert complete(shm_pair.router.url, body).status == 200
    wanted = set(block_keys([9] * 100, 32))
    eventually(lambda: all(wanted <= keys for keys in held(reader, index).values()), 10, "both publish the prompt")

    params = {"request_type": "context_only", "disagg_request_id": 2**41 + 7}
    sent = body | {"prompt": [8] * 70, "disaggregated_params": params}
    httpx.post(shm_pair.context.url + "/v1/completions", json=sent, timeout=30).raise_for_status()
    leases = eventually(lambda: next((found for found in reader.leases().values() if found), None), 5, "the lease")
    [(handoff_id, lease)] = leases.items()
    assert (handoff_id, lease.endpoint, lease.blocks) == (2**41 + 7, shm_pair.context.address, 3)
    release = {"disagg_request_id": handoff_id}
    httpx.post(shm_pair.context.url + "/handoff/release", json=release, timeout=5).raise_for_status()
    eventually(lambda: not any(reader.leases().values()), 5, "no lease is left")
    shm_pair.generation.stop()
    eventually(lambda: len(held(reader, index)) == 1, 15, "the one that has left is forgotten")
    reader.close()
