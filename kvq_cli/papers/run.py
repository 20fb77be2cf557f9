"""Run the commands of targets, record how results were made, and tell from the files whether a target is finished."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.benchmarking.kernels.performance_targets import load_gpu_results
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.runs import RUNS
from kvq_cli.files import write_json
from kvq_cli.papers.compact import compact_file
from kvq_cli.papers.report import write_report
from kvq_cli.papers.targets import REFERENCE, ROOT, STORE, Target
from kvq_cli.paths import artifact_folder

DONE, PARTLY, TO_DO, HARDWARE, NOTHING = "done", "partly", "to do", "needs hardware", "nothing to measure"
RECORD = "target.json"
#: Folder of the results of `make gpu`.
GPU_RESULTS = Path("benchmarks")


def state(target: Target, model: str, root: Path = ROOT) -> str:
    """Whether a target is finished, according to its files: DONE only if they were made by the current command, model
    and version, and by the artifacts that are here now.

    An artifact that is missing here does not count: a clone has the results without most of the artifacts.
    """
    if target.drawing:
        return NOTHING
    if target.gpu:
        return DONE if load_gpu_results(GPU_RESULTS) else HARDWARE
    record = _record(target, model, root)
    if record is None:
        return TO_DO
    current = current_record(target, model)
    current["artifacts"] = {**record.get("artifacts", {}), **current["artifacts"]}
    return DONE if record == current and target.result(model, root).is_file() else PARTLY


def run_target(
    target: Target,
    model: str,
    calibrations: Sequence[Sequence[str]],
    report: Callable[[str], None],
    root: Path = ROOT,
    store: Path = STORE,
    quiet: bool = False,
    ray: str | None = None,
    stdout: int | None = None,
) -> float:
    """Run a target and return the seconds it took. An interrupted target continues where it stopped.

    calibrations: commands that make missing artifacts first. report: called with each command line. quiet: the
    commands print no progress and no notes. ray: address of the cluster on which evaluations run; records do not
    name it. stdout: file descriptor to which the commands print their tables; None: standard output. KvqError when a
    command fails.
    """
    started = time.monotonic()
    silence = ["--quiet"] if quiet else []
    for words in calibrations:
        _run([*words, *silence], report, stdout)
    record = current_record(target, model)
    write_json(target.folder(model, root) / RECORD, {**record, "finished": False})
    command = target.command(model, root, store)
    # Fixed commands, like `bits --papers`, print nothing but their result, and have no such flag.
    cluster = [] if ray is None or command[0] != "eval" else ["--ray", ray]
    flags = [] if target.run else [*cluster, *silence]
    printed = _run([*command, *flags], report, subprocess.PIPE if target.into else stdout)
    if target.into:
        write_json(target.result(model, root), json.loads(printed))
    if not target.result(model, root).is_file():
        raise KvqError(f"{target.id}: {target.result(model, root)} was not written")
    if target.eval or target.config:
        write_report(target, model, target.folder(model, root))
    compact_file(target.result(model, root))
    shutil.rmtree(target.folder(model, root) / RUNS, ignore_errors=True)  # RECORD is the record of a target's run
    write_json(target.folder(model, root) / RECORD, {**record, "finished": True})
    return time.monotonic() - started


def _run(words: Sequence[str], report: Callable[[str], None], stdout: int | None = None) -> str:
    """Run a `kvq` command in its own process, so that its memory is freed; returns its standard output if that is
    `subprocess.PIPE`."""
    report(f"$ kvq {shlex.join(words)}")
    process = subprocess.run([sys.executable, "-m", "kvq_cli", *words], stdout=stdout, text=True, check=False)
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode:
        raise KvqError(f"kvq {words[0]} failed (exit code {process.returncode}); the same command continues from there")
    return process.stdout or ""


def current_record(target: Target, model: str) -> dict[str, Any]:
    """The record of a target finished now: version, command, model and artifacts. It names no folder of `root`."""
    return {
        "kvq": __version__,
        "command": ["kvq", *target.command(model)],
        "model": _model_version(model),
        "artifacts": _artifacts(target, model),
        "finished": True,
    }


def _record(target: Target, model: str, root: Path) -> dict[str, Any] | None:
    try:
        return json.loads((target.folder(model, root) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _artifacts(target: Target, model: str) -> dict[str, str]:
    """Checksums, by folder name, of the artifacts that the target's methods read by default."""
    checksums = {}
    for folder in {artifact_folder(model, method) for method in target.calibrated(model)}:
        try:
            checksums[folder.name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["checksum"]
        except (OSError, ValueError, KeyError):
            continue  # the command that reads the artifact reports the error
    return checksums


def _model_version(model: str) -> str:
    """The model's name; for the built-in model also a hash of its weights, which a version of kvq may change."""
    if model != REFERENCE:
        return model
    weights = files("kvq_cli.reference").joinpath("model", "model.safetensors").read_bytes()
    return f"{model} {sha256(weights).hexdigest()[:16]}"
