"""The smallest whole cluster, and the worker settings of the two hand-off paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_rig import Cluster, Part

SHM = {"cache_transceiver_config": {"backend": "DEFAULT"}}


def pool_settings(directory: Path, **store: object) -> dict[str, Any]:
    """Worker settings that join the pool of the cluster's master and hand over through it alone."""
    return {
        "cache_transceiver_config": {"backend": "POOL"},
        "kv_connector_config": {
            "connector": "mooncake-store",
            "mooncake_store": {
                "pool": f"file://{directory}/pool.json",
                "model_key": "tiny",
                "segment_size": "64MiB",
                "run_dir": str(directory / "pool"),
            }
            | store,
        },
    }


class Pair:
    """One context worker, one generation worker, a router, and an aggregated worker as the reference."""

    def __init__(self, cluster: Cluster, transport: str, **worker_settings: Any) -> None:
        self.cluster = cluster
        self.transport = transport
        cluster.start_registry()
        settings: dict[str, Any] = dict(SHM)
        if transport == "mooncake":
            self.master = cluster.start_master()
            settings = pool_settings(cluster.directory)
        settings |= worker_settings
        self.context = cluster.worker("context", "CONTEXT", settings)
        self.generation = cluster.worker("generation", "GENERATION", settings)
        self.aggregated = cluster.worker("aggregated", None, worker_settings)
        self.router = cluster.router()
        cluster.start_all(self.context, self.generation, self.aggregated, self.router)

    @property
    def workers(self) -> tuple[Part, Part]:
        return self.context, self.generation
