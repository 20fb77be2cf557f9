"""Parallel tasks on a CPU, deterministic algorithms on a GPU."""

import ctypes
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kvq_cli.calibration.parallel import deterministic, run_parallel


def test_tasks_run_in_parallel_on_one_torch_thread_each():
    threads = torch.get_num_threads()
    together, seen = threading.Barrier(3, timeout=20), []

    def task(item):
        together.wait()  # passes only when three tasks run at once
        seen.append((item, torch.get_num_threads()))

    assert len(list(run_parallel(task, range(6), workers=3))) == 6
    assert sorted(seen) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc keeps freed memory"
)
def test_freed_memory_goes_back_to_the_system():
    def resident():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    def task(_item):  # the last block, which stays, keeps those below it from leaving the top of the heap
        kept.append([torch.ones(25_000) for _ in range(1000)][-1])

    kept = []
    before = resident()
    list(run_parallel(task, range(2), workers=2))
    assert len(kept) == 2 and resident() - before < 60e6  # of 200 MB


def test_first_error_cancels_the_tasks_not_started():
    threads, begun = torch.get_num_threads(), []

    def task(item):
        begun.append(item)
        time.sleep(0.001)
        if item == 1:
            raise RuntimeError("the second one")

    with pytest.raises(RuntimeError, match="the second one"):
        for _ in run_parallel(task, range(10_000), workers=1):
            pass
    assert len(begun) < 10_000
    assert torch.get_num_threads() == threads


def test_deterministic_algorithms_are_on_inside_the_block_on_a_gpu(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
