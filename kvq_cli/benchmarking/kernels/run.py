"""Check, then time: the rows of a `kvq bench kernels` result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer
from kvq_cli.errors import KvqError


def check(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per case of the smallest shape that has an exact result. KvqError at the first that is not right: a wrong
    kernel's speed means nothing."""
    for experiment in experiments:
        shape, cases = next(iter(experiment.groups(sizes, device)))
        for case in cases:
            if case.error is None:
                continue
            error, allowed = case.error()
            if not error <= allowed:
                raise KvqError(
                    f"{experiment.operation}, {case.name} is wrong on this device: error {error:.2e}, at most "
                    f"{allowed:.2e} is right; nothing was timed"
                )
            yield {"operation": experiment.operation, "case": case.name, **shape, "error": error, "allowed": allowed}


def measure(
    experiments: Sequence[Experiment],
    sizes: Sizes,
    device: torch.device,
    timer: Timer,
    copy_rate: float,
    seconds: float = math.inf,
    step: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """One row per case and shape, baselines first. us: see `Timer.spread`; of_copy: bytes per second over those of a
    copy; ratio: the fastest baseline's median over the case's own. failed: why there is no time. Cases that are not
    begun within `seconds` have none."""
    end = time.monotonic() + seconds
    for experiment in experiments:
        for shape, cases in experiment.groups(sizes, device):
            rows = []
            for case in sorted(cases, key=lambda case: not case.baseline):
                about = {"operation": experiment.operation, "case": case.name, "baseline": case.baseline}
                timed = _row(case, timer, copy_rate) if time.monotonic() < end else {"failed": "time was over"}
                rows.append(about | shape | case.about | timed)
                step()
            plain = [row["us"]["p50"] for row in rows if row["baseline"] and "us" in row]
            for row in rows:
                if plain and "us" in row:
                    row["ratio"] = float(f"{min(plain) / row['us']['p50']:.3g}")
                yield row


def _row(case: Case, timer: Timer, copy_rate: float) -> dict[str, Any]:
    try:
        found = timer.spread([case.make(number) for number in range(timer.copies(case.nbytes))])
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except RuntimeError as error:
        if not case.baseline:  # one that this GPU or shape does not have
            raise
        return {"failed": str(error).splitlines()[0]}
    rate = case.nbytes / (found["p50"] * 1e-6)
    return {"us": found, "gb_s": float(f"{rate / 1e9:.4g}"), "of_copy": round(rate / copy_rate, 3)}


def count(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> int:
    """How many cases `measure` has, for a progress bar."""
    return sum(len(cases) for experiment in experiments for _, cases in experiment.groups(sizes, device))
