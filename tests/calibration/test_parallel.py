"""Parallel tasks on a CPU, deterministic algorithms on a GPU."""

import threading
import time

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
