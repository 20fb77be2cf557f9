"""Time and memory of a calibration, phase by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvq_cli.benchmarking.machine import PeakMemory, PeakResident
from kvq_cli.calibration.pipeline import calibrate
from kvq_cli.calibration.plan import CodebookPlan, FactorPlan


class Phases:
    """Seconds spent in each phase that is reported to it; `seconds` is in their order."""

    def __init__(self, show: Callable[[str, int, int], None]):
        self.seconds: dict[str, float] = defaultdict(float)
        self._show = show
        self._phase, self._since = "prepare", time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._show(phase, done, total)


def measure(plan: CodebookPlan | FactorPlan, show: Callable[[str, int, int], None]) -> dict:
    """Calibrate into a folder that is thrown away: seconds by phase and in all, peak memory, bytes of the tensors."""
    phases = Phases(show)
    device = plan.loaded.model.device
    with TemporaryDirectory() as folder, PeakMemory(device) if device.type == "cuda" else PeakResident() as peak:
        artifact = calibrate(plan, Path(folder) / "artifact", progress=phases)
    return {
        "phases_s": {name: round(seconds, 3) for name, seconds in phases.seconds.items()},
        "total_s": round(sum(phases.seconds.values()), 3),
        "peak_bytes": peak.bytes,
        "artifact_bytes": sum(t.numel() * t.element_size() for t in artifact.tensors.values()),
    }
