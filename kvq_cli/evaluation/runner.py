"""Runs evaluations for several subjects on the same samples, keeps each result as it comes, and sums up."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli import __version__
from kvq_cli.artifact.fingerprint import fingerprint
from kvq_cli.attention.attach import Attached, attach
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import Evaluation, Record, Subject
from kvq_cli.evaluation.results import SampleLog, log_file
from kvq_cli.evaluation.settings import Settings, evaluations
from kvq_cli.evaluation.summary import comparison
from kvq_cli.files import write_json

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

Tracker = Callable[[str, int, int], Callable[[int], None]]
"""(what, samples in all, samples already there) -> a function that is told how many more are done."""


def evaluate(
    loaded: LoadedModel,
    subjects: Sequence[Subject],
    settings: Settings,
    out: Path,
    *,
    store: Path | None = None,
    fresh: bool = False,
    track: Tracker = lambda what, total, done: lambda count: None,
) -> dict[str, Any]:
    """Evaluate all subjects on the same samples; returns what `OUT/comparison.json` holds.

    Finished samples are in `OUT/<subject.folder>/<task>-<length>-<key>.jsonl` at any time and are not evaluated again,
    unless `fresh`. Runs with the same `store` share them, there in `STORE/<method>/`, and only the documents in `out`,
    each with the places of its samples under `samples`. `OUT/<subject.folder>/results.json` follows lm-eval's schema:
    one for each configuration of a method, by whichever runs; `comparison.json` is of the last run alone. Raises
    UsageError for settings that cannot work, KvqError when nothing was compressed or the folder cannot be written.
    """
    model = {"name": loaded.name, "revision": loaded.revision, "fingerprint": fingerprint(loaded.model).to_dict()}
    model["dtype"] = str(loaded.model.dtype).removeprefix("torch.")
    todo = evaluations(settings, loaded)
    with ExitStack() as attachments:
        # All at once: a forward pass is compressed by the method whose cache it is given. What does not go with the
        # model shows here, before anything is written.
        attached = {
            one.label: attachments.enter_context(
                attach(loaded.model, one.chosen, prefill=settings.prefill, backend=settings.backend)
            )
            for one in subjects
        }
        logs = {}
        for evaluation in todo:
            for subject in subjects:
                key = {"kvq": __version__, "model": model, **subject.identity, **evaluation.config}
                backend = attached[subject.label].backend.summary
                if backend != "torch":  # whose answers have no such entry, so that older runs are taken up
                    key["backend"] = backend
                if store is None:
                    folder, option = _begun(out, subject, log_file(evaluation.name, key)), "--out"
                else:
                    folder, option = store / subject.method.name, "--store"
                logs[subject.label, evaluation.name] = SampleLog(folder, evaluation.name, key, fresh, option)
        for evaluation in todo:
            _run(loaded, evaluation, attached, {label: logs[label, evaluation.name] for label in attached}, track)
    found = {
        subject.label: {one.name: _records(one, logs[subject.label, one.name]) for one in todo} for subject in subjects
    }
    document = comparison(loaded, model, subjects, todo, found, settings)
    for one in subjects:
        results = document["methods"][one.label]
        results["config"]["backend"] = attached[one.label].backend.summary
        results["samples"] = {each.name: relpath(logs[one.label, each.name].path, out) for each in todo}
        write_json(out / one.folder / "results.json", results)
    write_json(out / "comparison.json", document)
    return document


def _begun(out: Path, subject: Subject, log: str) -> Path:
    """The subject's folder, or one of another name in which the same samples were begun."""
    found = sorted(out.glob(f"*/{glob.escape(log)}"), key=lambda path: path.parent.name != subject.folder)
    return found[0].parent if found else out / subject.folder


def _run(
    loaded: LoadedModel,
    evaluation: Evaluation,
    attached: Mapping[str, Attached],
    logs: Mapping[str, SampleLog],
    track: Tracker,
) -> None:
    """Evaluate what the logs lack."""
    pending = {label: [i for i in range(evaluation.count) if i not in log.records] for label, log in logs.items()}
    total, left = evaluation.count * len(attached), sum(map(len, pending.values()))
    advance = track(evaluation.name, total, total - left)
    for label, records in evaluation.run(loaded, attached, pending):
        if evaluation.alike:  # known now, not after an hour
            _check_compressed(evaluation, attached[label], label, records)
        logs[label].append(records)
        advance(len(records))
    for label, log in logs.items():
        _check_compressed(evaluation, attached[label], label, _records(evaluation, log))


def _check_compressed(evaluation: Evaluation, attached: Attached, label: str, records: Sequence[Record]) -> None:
    """An evaluation in which nothing was compressed says nothing about compression."""
    if attached.method.name != "fp16" and not any(record["cache"]["compressed"] for record in records):
        raise KvqError(
            f"{evaluation.name}: {label} compressed none of {records[0]['cache']['tokens']:.0f} tokens: all lie"
            f" within the windows that it keeps in full precision; use a longer --context or --seqlen, or --set"
        )


def _records(evaluation: Evaluation, log: SampleLog) -> list[Record]:
    """The records in order; of a log that an earlier run made longer, those that this run asks for."""
    return [log.records[index] for index in range(evaluation.count)]
