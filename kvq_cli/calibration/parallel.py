"""Run tasks side by side on a CPU's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

T = TypeVar("T")


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
