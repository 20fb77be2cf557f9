"""How calibration uses a machine: a CPU's cores side by side, a GPU in a fixed order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def run_parallel(task: Callable[[T], None], items: Iterable[T], workers: int) -> Iterator[None]:
    """Run `task` on every item, `workers` at a time; yields whenever one is done. The first error ends it.

    Meanwhile every operation of torch runs on one thread: tasks side by side keep all cores busy without waiting for
    each other, and sums come out the same whatever the number of cores.
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
        torch.set_num_threads(threads)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Have a GPU add in a fixed order, in attention's backward pass and in sums by code, so that the same calibration
    gives the same bytes. Where an operation has no such form, it stays as it is."""
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
