"""Mean scores over the tasks of a group, like `ruler` and `lm_eval:longbench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from kvq_cli.evaluation.base import Evaluation


def tasks_by_group(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Group name -> its tasks, for groups of more than one task. A task at several lengths is one task."""
    groups: dict[str, dict[str, Evaluation]] = {}
    for evaluation in evaluations:
        for name in evaluation.groups:
            groups.setdefault(name, {}).setdefault(evaluation.task, evaluation)
    return {name: list(tasks.values()) for name, tasks in groups.items() if len(tasks) > 1}


def group_means(
    results: Mapping[str, Mapping[str, Any]], evaluations: Sequence[Evaluation]
) -> dict[str, dict[str, Any]]:
    """Mean and standard error, by group, of each metric that all tasks of the group have.

    results: by task, `{"metric,filter": value, "metric_stderr,filter": error}`. Tasks have equal weights, or their
    numbers of samples as weights where `Evaluation.groups` says so.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, tasks in tasks_by_group(evaluations).items():
        weights = [task.count if task.groups[name] else 1 for task in tasks]
        groups[name] = {"alias": name}
        for key in results[tasks[0].task]:
            if "," not in key or "_stderr," in key:
                continue
            metric, _, filter_name = key.partition(",")
            error_key = f"{metric}_stderr,{filter_name}"
            values = _values(key, tasks, results)
            errors = _values(error_key, tasks, results)
            if values is not None:
                groups[name][key] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
                # Tasks have samples of their own: their errors are independent.
                groups[name][error_key] = (
                    sqrt(sum((w * error) ** 2 for w, error in zip(weights, errors, strict=True))) / sum(weights)
                    if errors is not None
                    else None
                )
    return groups


def _values(key: str, tasks: Sequence[Evaluation], results: Mapping[str, Mapping[str, Any]]) -> list[float] | None:
    """The key's value of each task; None if a task has none."""
    values = [results[task.task].get(key) for task in tasks]
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else None
