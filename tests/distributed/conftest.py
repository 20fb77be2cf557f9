"""Ray clusters on this machine: a head, and two nodes with one worker each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


def _start() -> tuple[Any, list[Any]]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    return cluster, nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster for tests that leave it as it is."""
    cluster, _ = _start()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, list[Any]]]:
    """(cluster, its two nodes), for a test that kills nodes. The head, which must live, runs no task."""
    cluster, nodes = _start()
    yield cluster, nodes
    cluster.shutdown()
