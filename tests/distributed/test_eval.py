"""`kvq eval` on workers: the same result files, also if a node dies in the middle."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

WORDS = ("eval", "--task", "perplexity", "--seqlen", "128", "--compare", "fp16,kivi-2bit", "--set", "residual=32")


def logs(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def scores(folder: Path) -> dict:
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    return {label: (each["results"], each["cache"]) for label, each in methods.items()}


def children(parent: int) -> list[int]:
    """The processes that `parent` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_eval_on_a_cluster_whose_node_dies_writes_the_files_of_one_process(kvq, two_nodes, tmp_path, monkeypatch):
    cluster, (node, _) = two_nodes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert kvq(*WORDS, "--windows", "24", "--out", "one").exit_code == 0
    assert kvq(*WORDS, "--windows", "2", "--out", "two").exit_code == 0  # the cluster resumes it
    raylet = node.all_processes["raylet"][0].process.pid
    at_death = []

    def kill():
        deadline = time.monotonic() + 120
        while min(content.count(b"\n") for content in logs(tmp_path / "two").values()) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = children(raylet)
        cluster.remove_node(node, allow_graceful=False)
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        at_death.append(logs(tmp_path / "two"))

    thread = threading.Thread(target=kill)
    thread.start()
    result = kvq(*WORDS, "--windows", "24", "--out", "two", "--ray", cluster.address)
    thread.join()
    assert result.exit_code == 0, result.stderr
    assert logs(tmp_path / "two") == logs(tmp_path / "one") != at_death[0]
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
