"""Run the commands of targets, record how results were made, and tell from the files whether a target is finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.benchmarking.kernels.performance_targets import measured_rows
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.runs import RUNS
from kvq_cli.files import load_json, write_json
from kvq_cli.papers.commands import Commands
from kvq_cli.papers.compact import compact_file
from kvq_cli.papers.inputs import file_digests, model_version, versions
from kvq_cli.papers.report import write_report
from kvq_cli.papers.targets import ROOT, STORE, Target
from kvq_cli.paths import artifact_folder

DONE, PARTLY, TO_DO, HARDWARE, NOTHING = "done", "partly", "to do", "needs hardware", "nothing to measure"
#: Finished, but calibration or evaluation computes other numbers by now: run again, and judged until then.
OLDER = "done by an earlier version"
JUDGED = (DONE, OLDER)
#: Keys of a record that an OLDER result may have other values of, or lack.
VERSIONS = ("kvq", "results", "versions", "clustering")
RECORD = "target.json"
#: Folder of the results of `make gpu`.
GPU_RESULTS = Path("benchmarks")


def state(target: Target, model: str, root: Path = ROOT) -> str:
    """Whether a target is finished, according to its files: DONE only if they were made by the current command, model,
    input files and version, and by the artifacts that are here now; OLDER if the version alone is another.

    An artifact that is missing here does not count: a clone has the results without most of the artifacts.
    """
    if target.drawing:
        return NOTHING
    if target.gpu:
        return DONE if any(measured_rows(GPU_RESULTS, *target.gpu)) else HARDWARE
    record = _record(target, model, root)
    if record is None:
        return TO_DO
    current = current_record(target, model)
    current["artifacts"] = {**record.get("artifacts", {}), **current["artifacts"]}
    record = {"files": current["files"], **record}  # records of earlier versions name no files
    if "results" in record:  # says when numbers change; of a fixed command, kvq's version alone can
        record["kvq"] = __version__
    if not target.result(model, root).is_file():
        return PARTLY
    if record == current:
        return DONE
    return OLDER if _without_versions(record) == _without_versions(current) else PARTLY


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
        write_json(target.result(model, root), load_json(printed))
    if not target.result(model, root).is_file():
        raise KvqError(f"{target.id}: {target.result(model, root)} was not written")
    if target.eval or target.config:
        write_report(target, model, target.folder(model, root))
    compact_file(target.result(model, root))
    shutil.rmtree(target.folder(model, root) / RUNS, ignore_errors=True)  # RECORD is the record of a target's run
    write_json(target.folder(model, root) / RECORD, {**record, "finished": True})


def current_record(target: Target, model: str) -> dict[str, Any]:
    """The record of a target finished now: versions, command, model, input files and artifacts. It names no folder of
    `root`."""
    return {
        "kvq": __version__,
        **versions(target, model),
        "command": ["kvq", *target.command(model)],
        "model": model_version(model),
        "files": file_digests(target, model),
        "artifacts": _artifacts(target, model),
        "finished": True,
    }


def _without_versions(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in VERSIONS}


def _record(target: Target, model: str, root: Path) -> dict[str, Any] | None:
    try:
        record = load_json((target.folder(model, root) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _artifacts(target: Target, model: str) -> dict[str, str]:
    """Checksums, by folder name, of the artifacts that the target's methods read by default."""
    checksums = {}
    for folder in sorted({artifact_folder(model, method) for method in target.calibrated(model)}):
        try:
            checksums[folder.name] = load_json((folder / "config.json").read_text(encoding="utf-8"))["checksum"]
        except (OSError, ValueError, KeyError):
            continue  # the command that reads the artifact reports the error
    return checksums
