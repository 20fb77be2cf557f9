"""Averages over the tasks of a group, like `lm_eval:longbench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from kvq_cli.evaluation.base import Evaluation


def members(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Group name -> its tasks, for groups of more than one task."""
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.group:
            groups.setdefault(evaluation.group, []).append(evaluation)
    return {name: tasks for name, tasks in groups.items() if len(tasks) > 1}


def group_means(results: Mapping[str, Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> dict[str, dict]:
    """By group: the mean of each metric that all its tasks have, with its standard error.

    results: by task, `{"metric,filter": value, "metric_stderr,filter": error}`. Tasks weigh the same, or by their
    number of samples where the group says so.
    """
    groups = {}
    for name, tasks in members(evaluations).items():
        weights = [task.count if task.weighted else 1 for task in tasks]
        weights = [weight / sum(weights) for weight in weights]
        groups[name] = {"alias": name}
        for key in results[tasks[0].task]:
            values = [results[task.task].get(key) for task in tasks]
            if "," not in key or "_stderr," in key or None in values:
                continue
            metric, _, filtered = key.partition(",")
            error_key = f"{metric}_stderr,{filtered}"
            errors = [results[task.task].get(error_key) for task in tasks]
            groups[name][key] = sum(weight * value for weight, value in zip(weights, values, strict=True))
            groups[name][error_key] = (
                None if None in errors else sqrt(sum((w * e) ** 2 for w, e in zip(weights, errors, strict=True)))
            )
    return groups
