"""Run calibration steps in parallel on a CPU, and deterministically on a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

from kvq_cli.calibration.free_memory import release_freed

T = TypeVar("T")


def run_parallel(task: Callable[[T], None], items: Iterable[T], workers: int) -> Iterator[None]:
    """Run `task` on every item in `workers` threads; yields after each. The first error ends the loop.

    Meanwhile torch runs every operation on one thread: the tasks keep all cores busy without waiting for each other,
    and sums do not depend on the number of cores. Memory that they freed goes back to the system at the end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(task, item) for item in items]):
            future.result()
            yield
    finally:
        pool.shutdown(cancel_futures=True)
        release_freed()
        torch.set_num_threads(threads)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, use torch's deterministic algorithms where they exist, so that equal calibrations give equal bytes.

    Affects attention's backward pass and scatter-adds, whose order of additions varies otherwise.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
