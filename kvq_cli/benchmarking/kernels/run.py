"""Check kernels, then time them: the rows of a `kvq bench kernels` result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from kvq_cli.benchmarking.kernels.experiment import Case, Experiment, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer

#: Identifies a row: cases of the same place except "case" are compared with each other.
PLACE = ("operation", "model", "batch", "context")


def check(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare each case with its reference at the first of these sizes: one row per case that has one.

    right: whether the error is at most what is allowed; failed: the exception, where there was one.
    """
    for experiment in experiments:
        shape, cases = next(iter(experiment.groups(sizes, device)))
        for case in cases:
            if case.error is None:
                continue
            row = {"operation": experiment.operation, "case": case.name, **shape}
            try:
                error, allowed = case.error()
            except Exception as failure:  # the other cases still count
                yield row | {"right": False, "failed": _first_line(failure)}
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
    measured: Collection[tuple] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Time the cases of one shape after the other, baselines first; each shape's rows together, as soon as they are.

    wrong: (operation, case) whose results are not right: they are not timed. measured: `place` of shapes to leave out.
    Columns: us: see `Timer.spread`. of_copy: bytes per second over those of a copy. ratio: the fastest baseline's
    median over the case's own. failed: why there is no time.
    """
    for experiment in experiments:
        for shape, cases in experiment.groups(sizes, device):
            if place({"operation": experiment.operation, **shape}) in measured:
                continue
            rows = []
            for case in sorted(cases, key=lambda case: not case.baseline):
                row = {"operation": experiment.operation, "case": case.name, "baseline": case.baseline}
                if (experiment.operation, case.name) in wrong:
                    timed: dict[str, Any] = {"failed": "its result is wrong on this device"}
                else:
                    timed = _timed(case, timer, copy_rate)
                rows.append(row | shape | case.about | timed)
            plain = [row["us"]["p50"] for row in rows if row["baseline"] and "us" in row]
            for row in rows:
                if plain and "us" in row:
                    row["ratio"] = float(f"{min(plain) / row['us']['p50']:.3g}")
            yield rows


def place(row: dict[str, Any]) -> tuple:
    """The operation and shape of a row."""
    return tuple(row.get(name) for name in PLACE)


def places(experiments: Sequence[Experiment], sizes: Sizes, device: torch.device) -> list[tuple]:
    """All operations and shapes that `measure` goes through."""
    return [
        place({"operation": experiment.operation, **shape})
        for experiment in experiments
        for shape, _ in experiment.groups(sizes, device)
    ]


def _timed(case: Case, timer: Timer, copy_rate: float) -> dict[str, Any]:
    try:
        times = timer.spread([case.make(number) for number in range(timer.copies(case.nbytes))])
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # a baseline that this GPU or shape does not have, or a kernel that fails at this shape
        return {"failed": _first_line(error)}
    rate = case.nbytes / (times["p50"] * 1e-6)
    return {"us": times, "gb_s": float(f"{rate / 1e9:.4g}"), "of_copy": round(rate / copy_rate, 3)}


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
