"""Calibrate MODEL in FOLDER repeatedly, kill each run at another step, and resume it: MODEL FOLDER STRIDE.

A step is a progress report, a file or folder renamed into place, or a sample written. Runs are killed before the first
step of each kind and before every STRIDE-th step. Prints one JSON line per run: the step, the exit status of the
resumed run and whether its artifact is the same. Each run is a separate process.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from kvq_cli.calibration import pipeline, work_folder
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.methods.temporalkv import TemporalKV
from kvq_cli.models import load_model

OPTIONS = CalibrationOptions(samples=4, seqlen=160, gradients=3, points=300, iterations=3)


class Steps:
    """Log each step; kill the process before step number `last`."""

    def __init__(self, log, last):
        self.log, self.left = log, last

    def __call__(self, name):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        self.log.write(name + "\n")
        self.log.flush()


def run(loaded, out, log, last=-1, resume=False):
    """Calibrate in a child process; returns its exit status."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    try:
        with open(log, "w") as file:
            _calibrate(loaded, out, Steps(file, last), resume)
        os._exit(0)
    finally:
        os._exit(1)


def _calibrate(loaded, out, step, resume):
    replace, rename, write = os.replace, Path.rename, work_folder.WorkFolder.write_sample
    os.replace = lambda a, b: (step(f"replace {Path(b).name}"), replace(a, b))
    Path.rename = lambda a, b: (step(f"rename {a.name}"), rename(a, b))
    work_folder.WorkFolder.write_sample = lambda *a: (step(f"numbers {a[1]} {a[2]}"), write(*a))
    plan = plan_calibration(loaded, TemporalKV(hybrid="head"), OPTIONS)
    pipeline.calibrate(plan, out, resume=resume, progress=lambda *a: step("progress " + " ".join(map(str, a))))


def digest(out):
    if out.with_name(out.name + ".work").exists():
        return "work is left"
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(out.iterdir()))).hexdigest()


def main(model, folder, stride):
    loaded, folder = load_model(model, device="cpu"), Path(folder)
    log = folder / "steps"
    assert run(loaded, folder / "whole", log) == 0
    expected, steps = digest(folder / "whole"), log.read_text().splitlines()
    kinds = [step.rstrip("0123456789 ") for step in steps]
    for last in sorted({kinds.index(kind) for kind in kinds} | set(range(0, len(steps), int(stride)))):
        out = folder / f"killed-{last}"
        status = run(loaded, out, log, last)
        assert status == signal.SIGKILL, status
        resumed = run(loaded, out, log, resume=True)
        print(json.dumps({"before": steps[last], "status": resumed, "equal": digest(out) == expected}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
