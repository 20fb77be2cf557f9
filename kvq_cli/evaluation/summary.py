"""From records to documents in lm-eval's result schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvq_cli import __version__
from kvq_cli.evaluation.aggregate import group_means, members
from kvq_cli.evaluation.base import Evaluation, Record, Subject, cache_summary
from kvq_cli.evaluation.ruler.tasks import TASKS
from kvq_cli.evaluation.settings import RULER, Settings
from kvq_cli.evaluation.tabulate import tabulate

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

LOWER_IS_BETTER = ("perplexity", "perplexity_uncompressed", "kl")


def comparison(
    loaded: LoadedModel,
    model: Mapping[str, Any],
    subjects: Sequence[Subject],
    evaluations: Sequence[Evaluation],
    records: Mapping[str, Mapping[str, Sequence[Record]]],
    settings: Settings,
) -> dict[str, Any]:
    """`{"methods": {label: lm-eval document}, "table": {"columns": [...], "rows": [...]}}`.

    records: by the subject's label and the evaluation's name.
    """
    methods = {
        subject.label: _document(loaded, model, subject, evaluations, records[subject.label], settings)
        for subject in subjects
    }
    table = tabulate(methods)
    return {"methods": methods, "table": {"columns": table.titles, "rows": table.cells()}}


def _document(
    loaded: LoadedModel,
    model: Mapping[str, Any],
    subject: Subject,
    evaluations: Sequence[Evaluation],
    records: Mapping[str, Sequence[Record]],
    settings: Settings,
) -> dict[str, Any]:
    """What lm-eval writes for one model, with the bits and bytes of the cache under `cache`."""
    import torch
    import transformers

    results: dict[str, dict] = {}
    for one in evaluations:
        results.setdefault(one.task, {"alias": one.task}).update(one.metrics(records[one.name]))
    tasks = list(results)
    groups = _ruler_average(results, evaluations) | group_means(results, evaluations)
    results |= groups
    return {
        "results": results,
        "groups": groups,
        "group_subtasks": ({RULER: [task for task in tasks if task in TASKS]} if RULER in groups else {})
        | {name: [one.task for one in found] for name, found in members(evaluations).items()},
        "configs": {one.name: dict(one.config) for one in evaluations},
        "versions": dict.fromkeys(results, Evaluation.version) | {one.task: one.version for one in evaluations},
        "n-shot": {one.task: one.config.get("num_fewshot", 0) for one in evaluations},
        "higher_is_better": {task: _better(metrics) for task, metrics in results.items()}
        | {
            name: dict(one.higher_is_better)
            for one in evaluations
            if one.higher_is_better
            for name in {one.task, one.group} & results.keys()
        },
        "n-samples": {
            one.task: {"original": one.available or one.count, "effective": one.count} for one in evaluations
        },
        "config": {
            "model": "kvq",
            "model_args": dict(model),
            "method": dict(subject.identity["method"]),
            "artifact": subject.identity.get("artifact"),
            "device": str(loaded.model.device),
            "limit": settings.limit,
            "random_seed": settings.seed,
            "settings": {key: value for key, value in asdict(settings).items() if key not in ("limit", "seed")},
        },
        "cache": {one.name: cache_summary(records[one.name]) for one in evaluations},
        "kvq_version": __version__,
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
    }


def _ruler_average(results: Mapping[str, Mapping], evaluations: Sequence[Evaluation]) -> dict[str, dict]:
    """RULER's own figure, the mean over the tasks at one length, where there is more than one task."""
    means = {}
    for length in sorted({one.length for one in evaluations if one.task in TASKS}):
        key = f"{length},none"
        scores = [results[one.task][key] for one in evaluations if one.task in TASKS and one.length == length]
        if len(scores) > 1:
            means[key] = sum(scores) / len(scores)
    return {RULER: {"alias": RULER, **means}} if means else {}


def _better(metrics: Mapping[str, Any]) -> dict[str, bool]:
    names = [key.removesuffix(",none") for key in metrics if key.endswith(",none") and "_stderr" not in key]
    return {name: name not in LOWER_IS_BETTER for name in names}
