"""Whole calibrations of a model, and interruptions of them at a step."""

from __future__ import annotations

from pathlib import Path

from kvq_cli.calibration import pipeline
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.methods.registry import build


def run(loaded, calibration, out, method=None, **options):
    return pipeline.calibrate(plan_calibration(loaded, method or build("temporalkv"), calibration), out, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Interrupted(Exception):
    """Stands for an interruption from outside, such as Ctrl-C."""


def stop_at(phase, done):
    def progress(*now):
        if now[:2] == (phase, done):
            raise Interrupted

    return progress
