"""Clusters shared by the tests of one module: starting one takes seconds, a request takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_pair import Pair
from cluster_rig import Cluster


@pytest.fixture(scope="module", params=["shm", "mooncake"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair of the module, once for each hand-off path."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield Pair(cluster, request.param)


@pytest.fixture(scope="module")
def shm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("cluster"), faults=True) as cluster:
        yield Pair(cluster, "shm")
