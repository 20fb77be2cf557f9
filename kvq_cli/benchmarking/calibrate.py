"""Time of a calibration by phase, and its peak memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvq_cli.benchmarking.machine import PeakMemory, PeakResident
from kvq_cli.calibration.kinds.base import CalibrationPlan
from kvq_cli.calibration.pipeline import calibrate


class PhaseTimer:
    """A progress callback that sums up the seconds of each phase in `seconds`, and passes the calls on to `show`."""

    def __init__(self, show: Callable[[str, int, int], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._show = show
        self._phase, self._since = "prepare", time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._show(phase, done, total)


def measure(plan: CalibrationPlan, show: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Calibrate into a temporary folder; returns seconds by phase and in total, peak memory, and artifact bytes."""
    timer = PhaseTimer(show)
    device = plan.loaded.model.device
    with TemporaryDirectory() as folder, PeakMemory(device) if device.type == "cuda" else PeakResident() as peak:
        artifact = calibrate(plan, Path(folder) / "artifact", progress=timer)
    return {
        "phases_s": {name: round(seconds, 3) for name, seconds in timer.seconds.items()},
        "total_s": round(sum(timer.seconds.values()), 3),
        "peak_bytes": peak.bytes,
        "artifact_bytes": sum(t.numel() * t.element_size() for t in artifact.tensors.values()),
    }
