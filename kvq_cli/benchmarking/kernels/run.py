"""Check and time the cases of experiments: the rows of a `kvq bench kernels` result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer
from kvq_cli.errors import reason

#: Columns that identify a group of cases, which are compared with each other.
KEY_COLUMNS = ("operation", "model", "batch", "context")
ShapeKey: TypeAlias = tuple[Any, ...]


def check(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare each case with its reference at the first shape of these sizes; yields a row per case with a reference.

    right: whether the error is at most the allowed one. failed: the exception, if one was raised.
    """
    for experiment in experiments:
        shape, cases = next(iter(experiment.shapes(sizes, device)))
        for case in cases:
            if case.error is None:
                continue
            row = {"operation": experiment.operation, "case": case.name, **shape}
            try:
                error, allowed = case.error()
            except Exception as failure:  # of any type: the other cases are still checked
                yield row | {"right": False, "failed": reason(failure)}
                continue
            yield row | {"right": error <= allowed, "error": error, "allowed": allowed}


def measure(
    experiments: Sequence[Experiment],
    sizes: Sizes,
    device: torch.device,
    timer: Timer,
    copy_rate: float,
    *,
    wrong: Collection[tuple[str, str]] = (),
    measured: Collection[ShapeKey] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Time the cases shape by shape, baselines first; yields the rows of each shape when all its cases are timed.

    wrong: pairs (operation, case) that failed the check and are not timed. measured: `shape_key` of shapes to skip.
    Columns: us: see `Timer.spread`. gb_s: rate of memory traffic. of_copy: that rate over `copy_rate`. ratio: the
    fastest baseline's median over the case's median. failed: why there is no time.
    """
    for experiment in experiments:
        for shape, cases in experiment.shapes(sizes, device):
            if shape_key({"operation": experiment.operation, **shape}) in measured:
                continue
            rows: list[dict[str, Any]] = []
            for case in sorted(cases, key=lambda case: not case.baseline):
                row: dict[str, Any] = {"operation": experiment.operation, "case": case.name, "baseline": case.baseline}
                if (experiment.operation, case.name) in wrong:
                    timed: dict[str, Any] = {"failed": "its result is wrong on this device"}
                else:
                    timed = _timed(case, timer, copy_rate)
                rows.append(row | shape | case.extra | timed)
            baselines = [row["us"]["p50"] for row in rows if row["baseline"] and "us" in row]
            for row in rows:
                if baselines and "us" in row:
                    row["ratio"] = float(f"{min(baselines) / row['us']['p50']:.3g}")
            yield rows


def shape_key(row: dict[str, Any]) -> ShapeKey:
    """Return the operation and shape of a row."""
    return tuple(row.get(name) for name in KEY_COLUMNS)


def all_shape_keys(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> list[ShapeKey]:
    """Return the `shape_key` of all shapes that `measure` times."""
    return [
        shape_key({"operation": experiment.operation, **shape})
        for experiment in experiments
        for shape, _ in experiment.shapes(sizes, device)
    ]


def _timed(case: Case, timer: Timer, copy_rate: float) -> dict[str, Any]:
    try:
        times = timer.spread([case.make(seed) for seed in range(timer.copies(case.nbytes))])
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # of any type: a baseline that does not support this GPU or shape, or a failing kernel
        return {"failed": reason(error)}
    rate = case.nbytes / (times["p50"] * 1e-6)
    return {"us": times, "gb_s": float(f"{rate / 1e9:.4g}"), "of_copy": round(rate / copy_rate, 3)}
