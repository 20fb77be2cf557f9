"""Run evaluations of several methods on the same samples, log each sample, and write the result documents."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli import RESULTS, __version__
from kvq_cli.artifact import Artifact
from kvq_cli.artifact.fingerprint import fingerprint, weights_digest
from kvq_cli.attention.attach import Attached, attach
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError, NotFiniteError, reading
from kvq_cli.evaluation.base import PERPLEXITY, ComparedMethod, Evaluation, Record, Tracker
from kvq_cli.evaluation.estimate import estimate
from kvq_cli.evaluation.remote import RemoteEvaluation, Unit
from kvq_cli.evaluation.runs import save_run
from kvq_cli.evaluation.sample_log import SampleLog, log_name
from kvq_cli.evaluation.seen_texts import seen_texts
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.evaluation.summary import comparison_document
from kvq_cli.model_source import library_versions

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

POLL_SECONDS = 0.5
"""How often a run looks whether samples that another run has claimed are finished."""


def evaluate(
    loaded: LoadedModel,
    methods: Sequence[ComparedMethod],
    settings: EvaluationSettings,
    out: Path,
    *,
    store: Path | None = None,
    fresh: bool = False,
    command: str | None = None,
    track: Tracker = lambda description, total, done: lambda count: None,
    overall: Tracker = lambda description, total, done: lambda count: None,
    note: Callable[[str], None] | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Evaluate all methods on the same samples; returns the content of `OUT/comparison.json`.

    Each finished sample is appended to `OUT/<folder>/<task>-<length>-<key>.jsonl` (folder: `ComparedMethod.folder`) and
    not evaluated again unless `fresh`. With `store`, samples go to `STORE/<method>/` instead and are shared by all runs
    with that store; documents name the paths of their samples under `samples`. Two runs at the same time with the same
    samples share the work. `OUT/runs/<id>.json` is the record of this run, with its time and `command`; documents
    follow lm-eval's schema. `OUT/<folder>/results.json` has the document of most samples of each method configuration,
    `OUT/comparison.json` the last run. Raises UsageError for invalid settings, KvqError if nothing was compressed or a
    folder cannot be written, NotFiniteError if all methods fail; one that fails among others is left out of the
    documents, and `failed` of `comparison.json` says why. track: shows the progress of each evaluation; overall: of
    all together, and of their preparation; note: prints what to expect, which short trials measure first, and options
    that tasks do not read. workers: evaluate there; the same results are appended in the same order.
    """
    started = datetime.now(UTC)
    model: dict[str, Any] = {
        "name": loaded.name,
        "revision": loaded.revision,
        "fingerprint": fingerprint(loaded.model).to_dict(),
    }
    model["dtype"] = str(loaded.model.dtype).removeprefix("torch.")
    if loaded.trust_remote_code:  # only then: samples of all other models keep their keys
        model["trust_remote_code"] = True
    state = {"results": RESULTS, "weights": weights_digest(loaded.model), "libraries": library_versions()}
    finished = {"kvq": __version__, "model": model, **state}
    evaluations = build_evaluations(settings, loaded, overall)
    for unread in _unread_options(evaluations):
        (note or _ignore)(unread)
    with ExitStack() as attachments:
        # Attach all methods at once: a forward pass uses the method whose cache it is given. A method that does not
        # support the model is refused here, before anything is written.
        attached = {
            method.label: attachments.enter_context(
                attach(loaded.model, method.attachable, prefill=settings.prefill, backend=settings.backend)
            )
            for method in methods
        }
        logs = {}
        for evaluation in evaluations:
            for method in methods:
                own = {**evaluation.config, **evaluation.resume_key}
                key = {**finished, "version": evaluation.version, **method.identity, **own}
                backend = attached[method.label].backend.summary
                if backend != "torch":  # keys of the PyTorch backend on a CPU name neither, so that older logs resume
                    key["backend"] = backend
                elif loaded.model.device.type != "cpu":
                    key["device"] = loaded.model.device.type
                if store is None:
                    folder, option = _log_folder(out, method, log_name(evaluation.name, key)), "--out"
                else:
                    folder, option = store / method.method.name, "--store"
                logs[method.label, evaluation.name] = SampleLog(
                    folder, evaluation.name, key, evaluation.count if fresh else 0, option, evaluation.required
                )
        if note is not None and (text := estimate(loaded, evaluations, attached, logs, workers)):
            note(text)
        remote = workers and RemoteEvaluation(workers, loaded, settings, methods, evaluations, attached)
        track = _with_total(track, overall, evaluations, logs)
        failed: dict[str, NotFiniteError] = {}
        for evaluation in evaluations:
            own = {label: logs[label, evaluation.name] for label in attached if label not in failed}
            execute = (
                partial(remote.run, evaluation.name) if remote else partial(_run_here, loaded, evaluation, attached)
            )
            failed |= _run(evaluation, attached, own, execute, track, note or _ignore)
            if failed and not any(method.label not in failed and method.method.name != "fp16" for method in methods):
                raise next(iter(failed.values()))
    methods = [method for method in methods if method.label not in failed]
    records = {
        method.label: {each.name: _records(each, logs[method.label, each.name]) for each in evaluations}
        for method in methods
    }
    with reading(f"sample logs in {out if store is None else store}", "evaluate again with --fresh"):
        document = comparison_document(loaded, model, methods, evaluations, records, settings)
    for method in methods:
        results = document["methods"][method.label]
        results["config"] |= state | {"backend": attached[method.label].backend.summary, "folder": method.folder}
        if PERPLEXITY in settings.tasks and (seen := _seen_texts(method, settings.datasets)):
            results["config"]["seen_texts"] = seen
        results["config"]["resume_keys"] = {each.name: dict(each.resume_key) for each in evaluations}
        results["samples"] = {each.name: relpath(logs[method.label, each.name].path, out) for each in evaluations}
    if failed:
        document["failed"] = {label: str(error) for label, error in failed.items()}
    save_run(out, document, command, started)
    return document


def _seen_texts(method: ComparedMethod, datasets: Sequence[str]) -> dict[str, str]:
    return seen_texts(method.attachable.config, datasets) if isinstance(method.attachable, Artifact) else {}


def _unread_options(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Notes on given options that some tasks do not read, as the command line's on those that none reads."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for evaluation in evaluations:
        for unread in evaluation.unread.items():
            tasks.setdefault(unread, []).append(evaluation.task)
    for (flag, why), names in tasks.items():
        yield f"note: {flag} has no effect on {', '.join(names)}: {why}"


def _ignore(_text: str) -> None:
    """Takes what nobody reads."""


def _with_total(
    track: Tracker, overall: Tracker, evaluations: Sequence[Evaluation], logs: Mapping[tuple[str, str], SampleLog]
) -> Tracker:
    """`track` that also shows `overall` how many samples of all evaluations are finished, where there are several."""
    if len(evaluations) < 2:
        return track
    counts = {each.name: each.count for each in evaluations}
    done = sum(index in log.records for (_, name), log in logs.items() for index in range(counts[name]))
    advance_total = overall("all evaluations", sum(counts[name] for _, name in logs), done)

    def tracked(description: str, total: int, done: int) -> Callable[[int], None]:
        advance = track(description, total, done)

        def both(count: int) -> None:
            advance_total(count)
            advance(count)

        return both

    return tracked


def _log_folder(out: Path, method: ComparedMethod, log: str) -> Path:
    """The folder that already holds this log, whatever its name; else the method's result folder."""
    existing = sorted(out.glob(f"*/{glob.escape(log)}"), key=lambda path: path.parent.name != method.folder)
    return existing[0].parent if existing else out / method.folder


Execute = Callable[[Iterator[Unit]], Iterator[tuple[Unit, Iterator[tuple[str, list[Record]]]]]]
"""Takes units one after another, and yields each with an iterator like that of `Evaluation.run`, in the same order."""


def _run_here(
    loaded: LoadedModel, evaluation: Evaluation, attached: Mapping[str, Attached], units: Iterator[Unit]
) -> Iterator[tuple[Unit, Iterator[tuple[str, list[Record]]]]]:
    for unit in units:
        yield unit, evaluation.run(loaded, attached, unit)


def _run(
    evaluation: Evaluation,
    attached: Mapping[str, Attached],
    logs: Mapping[str, SampleLog],
    execute: Execute,
    track: Tracker,
    note: Callable[[str], None],
) -> dict[str, NotFiniteError]:
    """Evaluate the samples that the logs lack, except those that another run evaluates at the same time.

    Returns the methods that led the model out of its dtype's range, with the error; their other samples are left out.
    """
    failed: dict[str, NotFiniteError] = {}
    with ExitStack() as opened:
        for log in logs.values():
            opened.enter_context(log)
        finished = _count_finished(evaluation, logs)
        advance = track(evaluation.name, evaluation.count * len(logs), finished)

        def show_progress() -> None:
            nonlocal finished
            finished, before = _count_finished(evaluation, logs), finished
            if finished > before:
                advance(finished - before)

        for label in _pending(evaluation, logs, failed):
            if damaged := logs[label].damaged:
                lines = ", ".join(map(str, damaged))
                note(f"{logs[label].path}: damaged, line {lines}; samples of no other line are evaluated again")
        waiting = False
        while pending := _pending(evaluation, logs, failed):
            show_progress()
            evaluated = False
            for unit, results in execute(_claimed(evaluation.units(pending), logs, failed)):
                evaluated = True
                try:
                    for label, records in results:
                        if evaluation.equal_lengths:  # fail on the first batch, not after an hour
                            _check_compressed(evaluation, attached[label], label, records)
                        logs[label].append(records)
                        show_progress()
                except NotFiniteError as error:
                    if len(logs) == 1 or not error.method:
                        raise
                    if error.method not in failed:
                        note(f"{error.method} is left out: {error}")
                    failed[error.method] = error
                for label, indices in unit.items():
                    logs[label].release(indices)
            if not evaluated and _pending(evaluation, logs, failed):
                if not waiting:
                    note(f"{evaluation.name}: waiting for samples that another run is evaluating")
                waiting = True
                time.sleep(POLL_SECONDS)
        show_progress()
    evaluation.forget()
    for label, log in logs.items():
        if label not in failed:
            with reading(log.path, "evaluate again with --fresh"):
                _check_compressed(evaluation, attached[label], label, _records(evaluation, log))
    return failed


def _claimed(units: Iterator[Unit], logs: Mapping[str, SampleLog], failed: Collection[str]) -> Iterator[Unit]:
    """The samples of each unit that no other run has claimed or finished, of methods that have not failed by then."""
    for unit in units:
        claims = {label: logs[label].claim(indices) for label, indices in unit.items() if label not in failed}
        if claimed := {label: indices for label, indices in claims.items() if indices}:
            yield claimed


def _pending(evaluation: Evaluation, logs: Mapping[str, SampleLog], failed: Collection[str]) -> dict[str, list[int]]:
    """Samples that no run has finished yet, by label, after reading what other runs have written; of methods that did
    not fail."""
    pending = {}
    for label, log in logs.items():
        log.refresh()
        if label in failed:
            continue
        if left := [index for index in range(evaluation.count) if index not in log.records]:
            pending[label] = left
    return pending


def _count_finished(evaluation: Evaluation, logs: Mapping[str, SampleLog]) -> int:
    return sum(index in log.records for log in logs.values() for index in range(evaluation.count))


def _check_compressed(evaluation: Evaluation, attached: Attached, label: str, records: Sequence[Record]) -> None:
    """KvqError if the method compressed no token in any of the records."""
    if attached.method.name != "fp16" and not any(record["cache"]["compressed"] for record in records):
        raise KvqError(
            f"{evaluation.name}: {label} compressed none of {records[0]['cache']['tokens']:.0f} tokens: all are"
            " within its full-precision windows; pass a longer --seqlen, or smaller windows with --set"
        )


def _records(evaluation: Evaluation, log: SampleLog) -> list[Record]:
    """Records of the evaluation's samples in order, without further samples that an earlier run logged."""
    return [log.records[index] for index in range(evaluation.count)]
