"""From records to documents in lm-eval's result schema, and to the rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvq_cli import __version__
from kvq_cli.evaluation.base import Evaluation, Record, Subject, cache_summary
from kvq_cli.evaluation.settings import PERPLEXITY, RULER, Settings

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

TASK_VERSION = 1
"""Raised when a task's samples or scores change, so that old numbers are not compared with new ones."""
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
    return {"methods": methods, "table": table(evaluations, methods)}


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
    groups = _ruler_average(results, evaluations)
    results |= groups
    return {
        "results": results,
        "groups": groups,
        "group_subtasks": {RULER: [task for task in tasks if task != PERPLEXITY]} if groups else {},
        "configs": {one.name: dict(one.config) for one in evaluations},
        "versions": dict.fromkeys(results, TASK_VERSION),
        "n-shot": {one.task: one.config.get("num_fewshot", 0) for one in evaluations},
        "higher_is_better": {task: _better(metrics) for task, metrics in results.items()},
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
    for length in sorted({one.length for one in evaluations if one.task != PERPLEXITY}):
        key = f"{length},none"
        scores = [results[one.task][key] for one in evaluations if one.task != PERPLEXITY and one.length == length]
        if len(scores) > 1:
            means[key] = sum(scores) / len(scores)
    return {RULER: {"alias": RULER, **means}} if means else {}


def _better(metrics: Mapping[str, Any]) -> dict[str, bool]:
    names = [key.removesuffix(",none") for key in metrics if key.endswith(",none") and "_stderr" not in key]
    return {name: name not in LOWER_IS_BETTER for name in names}


def table(evaluations: Sequence[Evaluation], methods: Mapping[str, Mapping]) -> dict[str, list]:
    """One row per method. Bits and bytes are those of the evaluation with the longest sequences."""
    ruler = [one for one in evaluations if one.task != PERPLEXITY]
    several = len({one.length for one in ruler}) > 1
    longest = max(evaluations, key=lambda one: one.length).name
    columns = ["method", *(f"{one.task} {one.length}" if several else one.task for one in ruler)]
    averages = [key for key in next(iter(methods.values()))["groups"].get(RULER, {}) if key.endswith(",none")]
    columns += [f"ruler mean {key.removesuffix(',none')}" if several else "ruler mean" for key in averages]
    columns += ["perplexity", "KL to fp16", "top-1"] if len(ruler) < len(evaluations) else []
    columns += ["bits", "bits measured", "cache KiB", "x smaller"]
    rows = []
    for label, document in methods.items():
        results, cache = document["results"], document["cache"][longest]
        row: list[Any] = [label]
        row += [_score(results[one.task], one.length) for one in ruler]
        row += [round(100 * results[RULER][key], 1) for key in averages]
        if len(ruler) < len(evaluations):
            found = results[PERPLEXITY]
            row += [round(found["perplexity,none"], 3), round(found["kl,none"], 5), round(100 * found["top1,none"], 1)]
        row += [cache["nominal_bits"], round(cache["measured_bits"], 3), round(cache["bytes"] / 1024, 1)]
        rows.append([*row, round(cache["ratio"], 2)])
    return {"columns": columns, "rows": rows}


def _score(metrics: Mapping[str, Any], length: int) -> str:
    """`95.0 ±2.3`, in percent as RULER prints it."""
    error = metrics[f"{length}_stderr,none"]
    return f"{100 * metrics[f'{length},none']:.1f}" + ("" if error is None else f" ±{100 * error:.1f}")
