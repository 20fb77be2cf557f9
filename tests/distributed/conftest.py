"""Ray clusters on this machine: a head, and nodes with one worker each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def _cluster(nodes: int) -> Iterator[tuple[Any, list[Any]]]:
    """The head, which must live, runs no task."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    for attempt in range(3):  # Ray gives a node 30 seconds, which a busy machine may exceed
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=0, include_dashboard=False)
            added = [cluster.add_node(num_cpus=1) for _ in range(nodes)]
            cluster.wait_for_nodes()
            break
        except Exception:
            cluster.shutdown()
            if attempt == 2:
                raise
    yield cluster, added
    cluster.shutdown()


@pytest.fixture(scope="module")
def _sent_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers are sent the functions of the test's module whole: they cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def cluster(_sent_whole: None) -> Iterator[Any]:
    """A cluster of two nodes, for tests that leave it as it is."""
    with _cluster(2) as (cluster, _):
        yield cluster


@pytest.fixture
def doomed(_sent_whole: None, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[Any]]]:
    """(cluster, its nodes), for a test that kills nodes: two, or `@pytest.mark.parametrize("doomed", [N],
    indirect=True)`."""
    with _cluster(getattr(request, "param", 2)) as both:
        yield both
