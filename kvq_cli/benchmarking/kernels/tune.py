"""Better configurations by trying: one number of an operation's table at a time, halved and doubled, the best kept."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from kvq_kernels import tuning

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer

#: What the median must fall to, at most: less is noise.
WORTH = 0.98
#: Beyond which a number is not tried: tables of cosines, registers and what a matrix unit takes end there.
BOUNDS = {
    "tokens": (16, 128),
    "columns": (16, 128),
    "warps": (1, 8),
    "stages": (1, 5),
    "waves": (1, 16),
    "queries": (8, 16),
    "registers": (96, 255),
}
#: How far the next number to try is from one; others are halved and doubled.
STEPS = {"stages": 1, "registers": 24}


def tune(
    experiments: Sequence[Experiment],
    sizes: Sizes,
    device: torch.device,
    timer: Timer,
    seconds: float,
    write: bool = True,
) -> Iterator[dict[str, Any]]:
    """Search each shape class's configuration: a row per class before the search and after each of its rounds.

    Classes are those that the experiments' cases ask for at the shape that an experiment is tuned at; a configuration
    is timed with all cases of its class together. Every round tries all neighbours of each class's best and takes the
    fastest that is right: on a GPU these are compiled and checked by processes side by side before they are timed.
    Rounds end when `seconds` are over, or when nothing is faster. `write` extends the operations' tables after every
    round, so that a search that is stopped goes on from there.
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
            for search, own_trials in zip(active, trials, strict=True):
                if search.step(own_trials, end):
                    improved.append(search)
                    if write:
                        tuning.extend(search.experiment.operation, gpu, {search.key: search.best})
                yield search.row(gpu)
            active = improved
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _searches(experiment: Experiment, sizes: Sizes, device: torch.device, timer: Timer) -> list[Search]:
    shape, cases = list(experiment.groups(sizes, device))[sizes.pick(experiment.tuned_at, 0)]
    classes: dict[str, list[Case]] = {}
    for case in cases:
        if case.error is not None:
            with tuning.trying(experiment.operation, {}) as trial:
                case.make(0)()
            for key in trial.asked:
                classes.setdefault(key, []).append(case)
    return [Search(experiment, key, own, shape, sizes, timer) for key, own in classes.items()]


def is_right(
    experiment: Experiment, key: str, names: Sequence[str], numbers: dict[str, int], sizes: Sizes, device: str
) -> bool:
    """Whether cases of these names compute right with a configuration of their class."""
    with tuning.trying(experiment.operation, numbers, key):
        try:
            _, cases = next(iter(experiment.groups(sizes, torch.device(device))))
            errors = [case.error() for case in cases if case.name in names and case.error is not None]
        except Exception:  # whichever of Triton's and the driver's errors: it cannot be used
            return False
    return all(error <= allowed for error, allowed in errors)


class Search:
    """The best configuration of one class so far, `best`, and its microseconds."""

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
        self.first = self.fastest = self._timed(self.best)

    def begin(self, pool: ProcessPoolExecutor | None) -> list[tuple[dict[str, int], Callable[[], bool]]]:
        """All neighbours of the best, and of each what tells whether it is right."""
        names, trials = [case.name for case in self.cases], []
        for name, value in self.best.items():
            for other in neighbours(name, value):
                numbers = self.best | {name: other}
                given = self.experiment, self.key, names, numbers, self.sizes.to_check, self.timer.device.type
                trials.append((numbers, pool.submit(is_right, *given).result if pool else partial(is_right, *given)))
        return trials

    def step(self, trials: list[tuple[dict[str, int], Callable[[], bool]]], end: float) -> bool:
        """Take the fastest of the neighbours; whether one was faster."""
        times = []
        for numbers, right in trials:
            if time.monotonic() < end and right():
                times.append((self._timed(numbers), numbers))
        took, numbers = min(times, key=lambda one: one[0], default=(math.inf, {}))
        if took >= WORTH * self.fastest:
            return False
        self.fastest, self.best = took, numbers
        return True

    def row(self, gpu: str) -> dict[str, Any]:
        row = {"operation": self.experiment.operation, "gpu": gpu, "class": self.key, **self.shape}
        return row | {"before_us": self.first, "us": self.fastest, "tried": self.tried, "best": self.best}

    def _timed(self, numbers: dict[str, int]) -> float:
        self.tried += 1
        with tuning.trying(self.experiment.operation, numbers, self.key):
            try:
                return sum(
                    self.timer.spread([case.make(number) for number in range(self.timer.copies(case.nbytes))])["p50"]
                    for case in self.cases
                )
            except Exception:  # as above
                return math.inf


def neighbours(name: str, value: int) -> list[int]:
    """Half and double, or a step less and more."""
    low, high = BOUNDS.get(name, (1, 1 << 16))
    near = (value - STEPS[name], value + STEPS[name]) if name in STEPS else (value // 2, 2 * value)
    return [other for other in near if low <= other <= high]
