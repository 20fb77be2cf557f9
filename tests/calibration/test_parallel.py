"""Tasks side by side, and a GPU's fixed order."""

import threading
import time

import pytest
import torch

from kvq_cli.calibration.parallel import deterministic, run_parallel


def test_tasks_run_side_by_side_each_on_one_thread():
    threads = torch.get_num_threads()
    together, seen = threading.Barrier(3, timeout=20), []

    def task(item):
        together.wait()  # passes only when three tasks are at work
        seen.append((item, torch.get_num_threads()))

    assert len(list(run_parallel(task, range(6), workers=3))) == 6
    assert sorted(seen) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == threads


def test_an_error_ends_it_and_what_has_not_begun_does_not():
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


def test_a_gpu_adds_in_a_fixed_order_only_meanwhile(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
