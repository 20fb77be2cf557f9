"""`kvq bench tune`: coordinate search of kernel configurations, which halves and doubles a parameter at a time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch
from kvq_kernels import tuning

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer

#: A configuration replaces the best one if its median is below this share of it: smaller gains are noise.
MIN_GAIN = 0.98
#: Smallest and largest value of a parameter: limits of the RoPE tables, the register file and MMA tiles.
BOUNDS = {
    "tokens": (16, 128),
    "columns": (16, 128),
    "warps": (1, 8),
    "stages": (1, 5),
    "waves": (1, 16),
    "queries": (8, 16),
    "words": (16, 64),
    "pairs": (16, 128),
    "programs": (1, 4),
    "chunks": (0, 3),
    "reload": (0, 1),
    "half_sums": (0, 1),
    "registers": (96, 255),
}
#: Parameters that change by a constant step; others are halved and doubled.
STEPS = {"stages": 1, "chunks": 1, "reload": 1, "half_sums": 1, "programs": 1, "registers": 24}
#: A configuration, and a function that waits for its check and returns whether it passed.
Trial: TypeAlias = tuple[dict[str, int], Callable[[], bool]]


def tune(
    experiments: Sequence[Experiment],
    sizes: Sizes,
    device: torch.device,
    timer: Timer,
    seconds: float,
    write: bool = True,
) -> Iterator[dict[str, Any]]:
    """Search the fastest configuration of each shape class; yields its row before the search and after each round.

    The classes are those that the cases look up at the experiment's `tuned_at` shape; a configuration's time is the sum
    over all cases of its class. A round times all neighbours of each class's best configuration and takes the fastest
    correct one; on a GPU, worker processes compile and check them first. The search ends after `seconds` or when no
    neighbour is faster. `write` extends the tuning tables after every round, so that a stopped search can continue.
    """
    end = time.monotonic() + seconds
    searches = [search for experiment in experiments for search in _searches(experiment, sizes, device, timer)]
    gpu = tuning.family(device)
    yield from (search.row(gpu) for search in searches)
    with ExitStack() as stack:
        pool = None
        if device.type == "cuda":
            pool = stack.enter_context(ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")))
        active = searches
        while active and time.monotonic() < end:
            trials = [search.begin(pool) for search in active]
            improved = []
            for search, neighbourhood in zip(active, trials, strict=True):
                if search.step(neighbourhood, end):
                    improved.append(search)
                    if write:
                        tuning.extend(search.experiment.operation, gpu, {search.key: search.best})
                yield search.row(gpu)
            active = improved
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _searches(experiment: Experiment, sizes: Sizes, device: torch.device, timer: Timer) -> list[Search]:
    shape, cases = list(experiment.shapes(sizes, device))[sizes.pick(experiment.tuned_at, 0)]
    classes: dict[str, list[Case]] = {}
    for case in cases:
        if case.error is not None:
            with tuning.trying(experiment.operation, {}) as trial:
                case.make(0)()
            for key in trial.looked_up:
                classes.setdefault(key, []).append(case)
    return [Search(experiment, key, members, shape, sizes, timer) for key, members in classes.items()]


def is_correct(
    experiment: Experiment, key: str, names: Sequence[str], values: dict[str, int], sizes: Sizes, device: str
) -> bool:
    """Whether the cases with these names pass their check with this configuration of the class `key`."""
    with tuning.trying(experiment.operation, values, key):
        try:
            _, cases = next(iter(experiment.shapes(sizes, torch.device(device))))
            errors = [case.error() for case in cases if case.name in names and case.error is not None]
        except Exception:  # of any type, from Triton or the driver: the configuration cannot run
            return False
    return all(error <= allowed for error, allowed in errors)


class Search:
    """The search of one class. best: its fastest configuration so far. fastest: that configuration's microseconds."""

    def __init__(
        self,
        experiment: Experiment,
        key: str,
        cases: Sequence[Case],
        shape: dict[str, Any],
        sizes: Sizes,
        timer: Timer,
    ) -> None:
        self.experiment, self.key, self.cases, self.shape = experiment, key, cases, shape
        self.sizes, self.timer = sizes, timer
        self.best = tuning.configuration(experiment.operation, key, timer.device)
        self.tried = 0
        self.initial = self.fastest = self._time(self.best)

    def begin(self, pool: ProcessPoolExecutor | None) -> list[Trial]:
        """Return all neighbours of the best configuration with their checks, which run in `pool` if there is one."""
        names = [case.name for case in self.cases]
        trials: list[Trial] = []
        for name, value in self.best.items():
            for other in neighbours(name, value):
                values = self.best | {name: other}
                check = partial(
                    is_correct, self.experiment, self.key, names, values, self.sizes.to_check, self.timer.device.type
                )
                trials.append((values, pool.submit(check).result if pool else check))
        return trials

    def step(self, trials: list[Trial], end: float) -> bool:
        """Time the correct trials until `end` and take the fastest; returns whether it is faster than the best."""
        times = []
        for values, correct in trials:
            if time.monotonic() < end and correct():
                times.append((self._time(values), values))
        fastest, values = min(times, key=lambda pair: pair[0], default=(math.inf, {}))
        if fastest >= MIN_GAIN * self.fastest:
            return False
        self.fastest, self.best = fastest, values
        return True

    def row(self, gpu: str) -> dict[str, Any]:
        """Return the row of the result: times in microseconds before the search and now, and the best values."""
        row = {"operation": self.experiment.operation, "gpu": gpu, "class": self.key, **self.shape}
        return row | {"before_us": self.initial, "us": self.fastest, "tried": self.tried, "best": self.best}

    def _time(self, values: dict[str, int]) -> float:
        """Return the sum of the cases' medians with this configuration; infinity if it cannot run."""
        self.tried += 1
        with tuning.trying(self.experiment.operation, values, self.key):
            try:
                return sum(
                    self.timer.spread([case.make(seed) for seed in range(self.timer.copies(case.nbytes))])["p50"]
                    for case in self.cases
                )
            except Exception:  # of any type, as in `is_correct`
                return math.inf


def neighbours(name: str, value: int) -> list[int]:
    """Return the next smaller and larger values of a parameter within its bounds."""
    low, high = BOUNDS.get(name, (1, 1 << 16))
    near = (value - STEPS[name], value + STEPS[name]) if name in STEPS else (value // 2, 2 * value)
    return [other for other in near if low <= other <= high]
