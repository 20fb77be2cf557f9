"""Calibrates the model MODEL again and again in FOLDER, killed at another step each time, and resumes it.

A step is a report of progress, a file or folder put in its place, or a sample's numbers written. It is killed before
the first of each kind and before every STRIDE-th. Prints one JSON line for each: where it was killed, how the resumed
run ended and whether it wrote the same. Each run is a process of its own.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from kvq_cli.calibration import pipeline, work_folder
from kvq_cli.calibration.settings import Settings
from kvq_cli.methods.temporalkv import TemporalKV
from kvq_cli.models import load_model

SETTINGS = Settings(samples=4, seqlen=160, gradients=3, points=300, iterations=3)


class Steps:
    """Counts steps, notes them, and dies before step number `last`."""

    def __init__(self, log, last):
        self.log, self.left = log, last

    def __call__(self, name):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        self.log.write(name + "\n")
        self.log.flush()


def run(loaded, out, log, last=-1, resume=False):
    """Calibrate in a process of its own; gives its exit status."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    try:
        with open(log, "w") as file:
            _calibrate(loaded, out, Steps(file, last), resume)
        os._exit(0)
    finally:
        os._exit(1)


def _calibrate(loaded, out, step, resume):
    replace, rename, write = os.replace, Path.rename, work_folder.WorkFolder.write_numbers
    os.replace = lambda a, b: (step(f"replace {Path(b).name}"), replace(a, b))
    Path.rename = lambda a, b: (step(f"rename {a.name}"), rename(a, b))
    work_folder.WorkFolder.write_numbers = lambda *a: (step(f"numbers {a[1]} {a[2]}"), write(*a))
    planned = pipeline.plan(loaded, TemporalKV(hybrid="head"), SETTINGS)
    pipeline.calibrate(planned, out, resume=resume, progress=lambda *a: step("progress " + " ".join(map(str, a))))


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
