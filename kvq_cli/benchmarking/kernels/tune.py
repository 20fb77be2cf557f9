"""Better configurations by trying: one number of an operation's table at a time, halved and doubled, the best kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from kvq_kernels import tuning

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer

#: What the median must fall to, at most: less is noise.
WORTH = 0.98
#: Beyond which a number is not tried: tables of cosines and registers end there.
BOUNDS = {"tokens": (16, 128), "columns": (16, 128), "warps": (1, 8), "stages": (1, 5), "waves": (1, 16)}


def tune(
    experiments: Sequence[Experiment],
    sizes: Sizes,
    device: torch.device,
    timer: Timer,
    seconds: float,
    write: bool = True,
    step: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """One row per shape class whose configuration was looked for; `write` extends the operations' tables by them.

    Classes are those that the experiment's cases ask for at the shape that it is tuned at; a configuration is timed
    with all cases of its class together, after they were right with it. seconds: shared out among the classes; what is
    found when they are over is kept.
    """
    gpu, end = tuning.family(device), time.monotonic() + seconds
    for number, experiment in enumerate(experiments):
        own_end = time.monotonic() + max(0.0, end - time.monotonic()) / (len(experiments) - number)
        shape, cases = list(experiment.groups(sizes, device))[sizes.pick(experiment.tuned_at, 0)]
        checks = {case.name: case.error for case in next(iter(experiment.groups(sizes, device)))[1]}
        classes = _classes(experiment.operation, cases)
        found = {}
        for left, (key, own) in zip(range(len(classes), 0, -1), classes.items(), strict=True):
            search = _Search(experiment.operation, key, own, [checks[case.name] for case in own], timer)
            row = search.run(time.monotonic() + max(0.0, own_end - time.monotonic()) / left)
            found[key] = row["best"]
            yield {"operation": experiment.operation, "gpu": gpu, "class": key, **shape, **row}
            step()
        if write and found:
            tuning.extend(experiment.operation, gpu, found)


def _classes(operation: str, cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Shape class -> the cases that ask for it."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        if case.error is None:
            continue
        with tuning.trying(operation, {}) as trial:
            case.make(0)()
        for key in trial.asked:
            found.setdefault(key, []).append(case)
    return found


class _Search:
    def __init__(
        self,
        operation: str,
        key: str,
        cases: Sequence[Case],
        checks: Sequence[Callable[[], tuple[float, float]]],
        timer: Timer,
    ) -> None:
        self.operation, self.key, self.timer, self.checks = operation, key, timer, checks
        self.calls = [[case.make(number) for number in range(timer.copies(case.nbytes))] for case in cases]
        self.tried = 0

    def run(self, end: float) -> dict[str, Any]:
        """`best` numbers, their time and that of the table's, and how many were tried until `end`."""
        best = tuning.configuration(self.operation, self.key, self.timer.device)
        first = fastest = self.measured(best)
        improved = True
        while improved and time.monotonic() < end:
            improved = False
            for name in list(best):
                for other in neighbours(name, best[name]):
                    if time.monotonic() >= end:
                        break
                    changed = best | {name: other}
                    took = self.measured(changed)
                    if took < WORTH * fastest:
                        best, fastest, improved = changed, took, True
        return {"before_us": first, "us": fastest, "tried": self.tried, "best": best}

    def measured(self, numbers: dict[str, int]) -> float:
        """Microseconds of all cases; infinity for what this GPU refuses or computes wrong."""
        self.tried += 1
        with tuning.trying(self.operation, numbers, self.key):
            try:
                for check in self.checks:
                    error, allowed = check()
                    if not error <= allowed:
                        return float("inf")
                return sum(self.timer.spread(calls)["p50"] for calls in self.calls)
            except Exception:  # whichever of Triton's and the driver's errors
                return float("inf")


def neighbours(name: str, value: int) -> list[int]:
    """Half and double; of stages, one less and one more."""
    low, high = BOUNDS.get(name, (1, 1 << 16))
    near = (value - 1, value + 1) if name == "stages" else (value // 2, 2 * value)
    return [other for other in near if low <= other <= high]
