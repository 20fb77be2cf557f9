"""Records of evaluation runs: `OUT/runs/ID.json` has a run's time, command and documents, and is never replaced.

What a result folder shows by default: the newest run, with each method's result of most samples among all runs of the
same model, tasks, task settings and versions. Methods that only earlier ones of these runs have are shown, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.sample_log import digest
from kvq_cli.files import cannot_write, load_json, read_text, write_json

RUNS, COMPARISON, RESULTS = "runs", "comparison.json", "results.json"


@dataclass(frozen=True)
class Run:
    """A finished run: its number in the folder, its documents by label, and why others of its methods failed, by label.

    time: of its start, UTC, ISO 8601; seconds, command: None where a version of kvq without records wrote the results.
    """

    id: int
    time: str
    seconds: float | None
    command: str | None
    methods: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]

    @property
    def settings(self) -> str:
        """Equal for runs whose scores can stand in one table: same model, tasks, task settings and versions."""
        return _settings(next(iter(self.methods.values())))


@dataclass(frozen=True)
class ShownResults:
    """Documents by label; fewer: newer results of shown methods that have fewer samples, as `(run, label, samples)`;
    others: numbers of runs with other settings; failed: methods of which no later run has a result, with the error."""

    methods: dict[str, Any]
    fewer: Sequence[tuple[int, str, str]] = ()
    others: Sequence[int] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


def samples(document: Mapping[str, Any]) -> str:
    """Number of samples of a method's document: `8`, or `4-8` where tasks differ."""
    counts = [count["effective"] for count in document["n-samples"].values()]
    return f"{min(counts)}" if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def run_of(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """`{"id": ..., "time": ..., "seconds": ..., "command": ...}` of a method's document; None without a record."""
    return document["config"].get("run")


def describe_run(document: Mapping[str, Any]) -> str:
    """`run 3, 2026-11-23 07:30 UTC, n = 8`: which run a method's document is of, and its number of samples."""
    count, run = f"n = {samples(document)}", run_of(document)
    if run is None:
        return f"{count}; the run is not recorded"
    return f"run {run['id']}, {run['time'][:16].replace('T', ' ')} UTC, {count}"


def save_run(out: Path, document: dict[str, Any], command: str | None, started: datetime) -> None:
    """Record a finished run in `OUT/runs`, and write `OUT/comparison.json` and `OUT/<folder>/results.json`.

    document: a comparison, to which the run is added: `run`, and `config.run` of each method. A result of more samples
    with the same settings stays in `results.json`.
    """
    folder = out / RUNS
    if not folder.exists():
        _adopt(out)
    ended = datetime.now(UTC)
    run = {
        "id": _reserve(folder),
        "time": started.astimezone(UTC).isoformat(timespec="seconds"),
        "seconds": round((ended - started).total_seconds(), 1),
        "command": command,
    }
    document["run"] = run
    for method in document["methods"].values():
        method["config"]["run"] = run
    write_json(folder / f"{run['id']}.json", document)
    write_json(out / COMPARISON, document)
    for method in document["methods"].values():
        path = out / method["config"]["folder"] / RESULTS
        if not _has_more(path, method):
            write_json(path, method)


def load_runs(out: Path) -> list[Run]:
    """All recorded runs of a result folder, oldest first; KvqError for a damaged record."""
    numbers = sorted(int(path.stem) for path in (out / RUNS).glob("*.json") if path.stem.isdecimal())
    paths = [out / RUNS / f"{number}.json" for number in numbers]
    return [_run(path) for path in paths if path.stat().st_size]  # empty: killed while writing


def shown_results(folder: Path, run: int | None = None) -> ShownResults:
    """What a result folder shows: a run by its number, or what the comment at the top of this file says.

    folder: of `kvq eval --out`, or of one method in it. Raises KvqError if it contains no results, UsageError for a run
    that it does not contain.
    """
    runs = load_runs(folder)
    if run is not None:
        if asked := [each for each in runs if each.id == run]:
            return ShownResults(dict(asked[0].methods), failed=asked[0].failed)
        known = ", ".join(str(each.id) for each in runs) or "none are recorded"
        raise UsageError(f"--run {run}: no such run in {folder}; runs: {known}")
    if not runs:
        single = (folder / RESULTS).is_file() and not (folder / COMPARISON).exists()
        only, unfinished = read_methods(folder / (RESULTS if single else COMPARISON))
        return ShownResults(only, failed=unfinished)
    same = [each for each in runs if each.settings == runs[-1].settings]
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}  # by configuration: labels and documents
    failed: dict[str, str] = {}
    for each in same:
        failed = {label: error for label, error in failed.items() if label not in each.methods} | dict(each.failed)
        for label, document in each.methods.items():
            found.setdefault(_configuration(document), []).append((label, document))
    best = {key: _best(documents) for key, documents in found.items()}
    methods = dict(best.values())
    if len(methods) < len(best):  # labels are unique within a run only
        methods = {document["config"]["folder"]: document for _, document in best.values()}
    fewer = [
        (each.id, label, samples(document))
        for each in same
        for label, document in each.methods.items()
        if (kept := best[_configuration(document)][1])["config"]["run"]["id"] < each.id
        and _count(document) < _count(kept)
    ]
    return ShownResults(methods, fewer, [each.id for each in runs if each not in same], failed)


def _best(documents: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, Mapping[str, Any]]:
    """Of one method's labels and documents, oldest first: that of most samples, the newest of equal ones. Only those
    count that were computed as the newest was, which may be on another backend."""
    way = _computed(documents[-1][1])
    return max((each for each in reversed(documents) if _computed(each[1]) == way), key=lambda each: _count(each[1]))


def read_methods(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Documents by label of a comparison, and why others of its methods failed, by label; or the document of one
    method, which its folder names. KvqError if it is none."""
    try:
        document = load_json(read_text(file))
        methods = {file.parent.resolve().name: document} if file.name == RESULTS else document["methods"]
        methods = {label: one for label, one in methods.items() if one["results"] and one["config"]["method"]}
        failed = {str(label): str(error) for label, error in document.get("failed", {}).items()}
        complete = bool(methods) and all(map(_is_complete, methods.values()))
    except OSError as error:
        raise KvqError(f"{file}: {error.strerror or error}; give the folder that `kvq eval` wrote to") from None
    except ValueError as error:
        raise KvqError(f"{file}: not JSON ({error}); delete it, and run the evaluation again") from None
    except (KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise KvqError(f"{file}: not the result of an evaluation; delete it, and run the evaluation again")
    return methods, failed


def _is_complete(document: Mapping[str, Any]) -> bool:
    """Whether a method's document has what tables and pages read; KeyError, TypeError or AttributeError where not."""
    return (
        all(isinstance(document[key], dict) for key in ("n-samples", "higher_is_better", "cache"))
        and all(isinstance(each["effective"], int) for each in document["n-samples"].values())
        and isinstance(document["config"]["method"]["name"], str)
    )


def _run(path: Path) -> Run:
    methods, failed = read_methods(path)
    try:
        record = dict(run_of(next(iter(methods.values()))) or {})
        return Run(int(path.stem), record["time"], record["seconds"], record["command"], methods, failed)
    except (KeyError, TypeError):
        raise KvqError(f"{path}: not the record of a run; delete it") from None


def _adopt(out: Path) -> None:
    """Record the comparison that a version of kvq without records left, before the first recorded run replaces it."""
    path = out / COMPARISON
    try:
        methods, failed = read_methods(path)
    except KvqError:
        return
    time = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    run = {"id": _reserve(out / RUNS), "time": time, "seconds": None, "command": None}
    for label, method in methods.items():
        method["config"] = {"folder": label, **method["config"], "run": run}
    document = {"run": run, "methods": methods} | ({"failed": failed} if failed else {})
    write_json(out / RUNS / f"{run['id']}.json", document)


def _reserve(folder: Path) -> int:
    """The next free number of a run; its empty file is created, so that no run at the same time takes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=0)
        while True:
            try:
                os.close(os.open(folder / f"{number}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return number
            except FileExistsError:
                number += 1
    except OSError as error:
        raise cannot_write(folder, error) from error


def _has_more(path: Path, document: Mapping[str, Any]) -> bool:
    """Whether the file has a result of the same settings with more samples."""
    try:
        [kept] = read_methods(path)[0].values()
        same = _settings(kept) == _settings(document) and _computed(kept) == _computed(document)
        return same and _count(kept) > _count(document)
    except (KvqError, KeyError, TypeError):  # missing or damaged: to be replaced
        return False


def _settings(document: Mapping[str, Any]) -> str:
    return digest(settings(document))


def settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What all methods of a run share, and what their samples depend on. Documents of earlier versions lack `results`,
    `weights` or `resume_keys`: they are not taken for results of this one."""
    config = document["config"]
    named = {"model": "model_args", "weights": "weights", "results": "results", "prompts": "resume_keys"}
    key = {name: config.get(value) for name, value in named.items()}
    return key | {
        "tasks": document.get("configs"),
        "versions": document.get("versions"),
        "kvq": document.get("kvq_version"),
    }


def _computed(document: Mapping[str, Any]) -> str:
    """What computed a method's results: the backend of its attention, which may differ between the methods of a run,
    the kind of device and the libraries' versions."""
    return digest({key: document["config"].get(key) for key in ("backend", "device", "libraries")})


def _configuration(document: Mapping[str, Any]) -> str:
    """Digest of the method's options and artifact, which its label need not name."""
    return digest({key: document["config"].get(key) for key in ("method", "artifact")})


def _count(document: Mapping[str, Any]) -> int:
    return sum(count["effective"] for count in document["n-samples"].values())
