"""Result documents in lm-eval's schema, computed from sample records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvq_cli import __version__
from kvq_cli.evaluation.aggregate import group_means, tasks_by_group
from kvq_cli.evaluation.base import ComparedMethod, Evaluation, Record, cache_summary
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.evaluation.tabulate import tabulate

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

LOWER_IS_BETTER = ("perplexity", "perplexity_uncompressed", "kl")


def comparison_document(
    loaded: LoadedModel,
    model: Mapping[str, Any],
    methods: Sequence[ComparedMethod],
    evaluations: Sequence[Evaluation],
    records: Mapping[str, Mapping[str, Sequence[Record]]],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """`{"methods": {label: lm-eval document}, "table": {"columns": [...], "rows": [...]}}`.

    records: by the method's label and the evaluation's name.
    """
    documents = {
        method.label: _document(loaded, model, method, evaluations, records[method.label], settings)
        for method in methods
    }
    table = tabulate(documents)
    return {"methods": documents, "table": {"columns": table.titles, "rows": table.cells()}}


def _document(
    loaded: LoadedModel,
    model: Mapping[str, Any],
    method: ComparedMethod,
    evaluations: Sequence[Evaluation],
    records: Mapping[str, Sequence[Record]],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """One method's document in lm-eval's result schema, with bits and bytes of the cache under `cache`."""
    import torch
    import transformers

    results: dict[str, dict] = {}
    for evaluation in evaluations:
        metrics = evaluation.metrics(records[evaluation.name])
        results.setdefault(evaluation.task, {"alias": evaluation.task}).update(metrics)
    groups = group_means(results, evaluations)
    results |= groups
    return {
        "results": results,
        "groups": groups,
        "group_subtasks": {
            name: [one.task for one in members] for name, members in tasks_by_group(evaluations).items()
        },
        "configs": {one.name: dict(one.config) for one in evaluations},
        "versions": dict.fromkeys(results, Evaluation.version)
        | {name: one.version for one in evaluations for name in {one.task, *one.groups} & results.keys()},
        "n-shot": {one.task: one.config.get("num_fewshot", 0) for one in evaluations},
        "higher_is_better": {task: _higher_is_better(metrics) for task, metrics in results.items()}
        | {
            name: dict(one.higher_is_better)
            for one in evaluations
            if one.higher_is_better
            for name in {one.task, *one.groups} & results.keys()
        },
        "n-samples": {
            one.task: {"original": one.available or one.count, "effective": one.count} for one in evaluations
        },
        "config": {
            "model": "kvq",
            "model_args": dict(model),
            "method": dict(method.identity["method"]),
            "artifact": method.identity.get("artifact"),
            "device": str(loaded.model.device),
            "limit": settings.samples,
            "random_seed": settings.seed,
            "chat_template": {
                one.task: one.config["chat_template"] for one in evaluations if "chat_template" in one.config
            },
            "settings": {key: value for key, value in asdict(settings).items() if key not in ("samples", "seed")},
        },
        "cache": {one.name: cache_summary(records[one.name]) for one in evaluations},
        "kvq_version": __version__,
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
    }


def _higher_is_better(metrics: Mapping[str, Any]) -> dict[str, bool]:
    names = [key.removesuffix(",none") for key in metrics if key.endswith(",none") and "_stderr" not in key]
    return {name: name not in LOWER_IS_BETTER for name in names}
