"""Ray clusters of two nodes on this machine, with one worker each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


def _start() -> tuple[Any, Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return cluster, node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster for tests that leave it as it is."""
    cluster, _ = _start()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """(cluster, its second node), for a test that kills the node."""
    cluster, node = _start()
    yield cluster, node
    cluster.shutdown()
