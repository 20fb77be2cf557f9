"""How calibration uses a machine: a CPU's cores side by side, a GPU in a fixed order."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def side_by_side(task: Callable[[T], None], items: Iterable[T], workers: int) -> Iterator[None]:
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


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: giving back and fetching each large tensor's pages makes threads wait for each
    other, which costs clustering a third of its time. Does nothing where the C library is another."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 25), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 1 << 26)):
        mallopt(option, value)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
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
