"""Runs a target's command, keeps what it was, and tells from the files how far a target is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.benchmarking.kernels.targets import results as gpu_results
from kvq_cli.errors import KvqError
from kvq_cli.files import write_json
from kvq_cli.papers.report import write_report
from kvq_cli.papers.targets import REFERENCE, ROOT, STORE, Target
from kvq_cli.paths import artifact_folder

DONE, PARTLY, TO_DO, HARDWARE, NOTHING = "done", "partly", "to do", "needs hardware", "nothing to measure"
RECORD = "target.json"
#: Where `make gpu` leaves what it measured.
GPU_RESULTS = Path("benchmarks")


def state(target: Target, model: str, root: Path = ROOT) -> str:
    """How far a target is, by its files: done only if these were made by today's command, model and version.

    Artifacts must be those that it was made with; one that is not here, as most are not where results alone were copied
    or cloned to, says nothing against them.
    """
    if target.drawing:
        return NOTHING
    if target.gpu:
        return DONE if gpu_results(GPU_RESULTS) else HARDWARE
    record = _record(target, model, root)
    if record is None:
        return TO_DO
    today = _today(target, model)
    today["artifacts"] = {**record.get("artifacts", {}), **today["artifacts"]}
    return DONE if record == today and target.result(model, root).is_file() else PARTLY


def run_target(
    target: Target,
    model: str,
    calibrations: Sequence[Sequence[str]],
    say: Callable[[str], None],
    root: Path = ROOT,
    store: Path = STORE,
) -> float:
    """Run what is missing for a target; returns the seconds it took.

    calibrations: commands for artifacts that are missing. `say` is told each command. What was interrupted goes on
    where it stopped. Raises KvqError when a command fails.
    """
    started = time.monotonic()
    for words in calibrations:
        _run(words, say)
    today = _today(target, model)
    write_json(target.folder(model, root) / RECORD, {**today, "finished": False})
    printed = _run(target.command(model, root, store), say, keep=target.into is not None)
    if target.into:
        write_json(target.result(model, root), json.loads(printed))
    if not target.result(model, root).is_file():
        raise KvqError(f"{target.id}: {target.result(model, root)} was not written")
    if target.eval or target.config:
        write_report(target, model, target.folder(model, root))
    write_json(target.folder(model, root) / RECORD, {**today, "finished": True})
    return time.monotonic() - started


def _run(words: Sequence[str], say: Callable[[str], None], keep: bool = False) -> str:
    """One `kvq` command in a process of its own, so that none inherits another's memory."""
    say(f"$ kvq {shlex.join(words)}")
    done = subprocess.run(
        [sys.executable, "-m", "kvq_cli", *words], stdout=subprocess.PIPE if keep else None, text=True, check=False
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise KvqError(f"kvq {words[0]} failed (exit code {done.returncode}); the same command goes on from there")
    return done.stdout or ""


def _today(target: Target, model: str) -> dict[str, Any]:
    """What a finished target's record says; where its folder is makes no difference."""
    return {
        "kvq": __version__,
        "command": ["kvq", *target.command(model)],
        "model": _stamp(model),
        "artifacts": _artifacts(target, model),
        "finished": True,
    }


def _record(target: Target, model: str, root: Path) -> dict[str, Any] | None:
    try:
        return json.loads((target.folder(model, root) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _artifacts(target: Target, model: str) -> dict[str, str]:
    """The checksums of the artifacts that its methods read by default: with others its results are others."""
    found = {}
    for folder in {artifact_folder(model, method) for method in target.calibrated(model)}:
        try:
            found[folder.name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["checksum"]
        except (OSError, ValueError, KeyError):
            continue  # the command that reads it says what is wrong
    return found


def _stamp(model: str) -> str:
    """The model, and for the built-in one the hash of its weights, which change with kvq."""
    if model != REFERENCE:
        return model
    weights = files("kvq_cli.reference").joinpath("model", "model.safetensors").read_bytes()
    return f"{model} {sha256(weights).hexdigest()[:16]}"
