"""Run the commands of targets, record how results were made, and tell from the files whether a target is finished."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.benchmarking.kernels.performance_targets import load_gpu_results
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.runs import RUNS
from kvq_cli.files import write_json
from kvq_cli.papers.commands import Commands
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
    commands: Commands,
    root: Path = ROOT,
    store: Path = STORE,
    quiet: bool = False,
    ray: str | None = None,
) -> None:
    """Run a target, whose artifacts exist. An interrupted target continues where it stopped.

    quiet: the commands print no progress and no notes. ray: address of the cluster on which evaluations run; records
    do not name it. Errors as for `Commands.run`.
    """
    record = current_record(target, model)
    write_json(target.folder(model, root) / RECORD, {**record, "finished": False})
    command = target.command(model, root, store)
    # Fixed commands, like `bits --papers`, print nothing but their result, and have no such flag.
    cluster = [] if ray is None or command[0] != "eval" else ["--ray", ray]
    flags = [] if target.run else [*cluster, *(["--quiet"] if quiet else [])]
    printed = commands.run([*command, *flags], target.id, into=bool(target.into))
    if target.into:
        write_json(target.result(model, root), json.loads(printed))
    if not target.result(model, root).is_file():
        raise KvqError(f"{target.id}: {target.result(model, root)} was not written")
    if target.eval or target.config:
        write_report(target, model, target.folder(model, root))
    compact_file(target.result(model, root))
    shutil.rmtree(target.folder(model, root) / RUNS, ignore_errors=True)  # RECORD is the record of a target's run
    write_json(target.folder(model, root) / RECORD, {**record, "finished": True})


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
