"""Means over tasks that were asked for under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from kvq_cli.evaluation.base import Evaluation


def members(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """The tasks by the name of their group, of groups with more than one."""
    found: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        if one.group:
            found.setdefault(one.group, []).append(one)
    return {name: tasks for name, tasks in found.items() if len(tasks) > 1}


def group_means(results: Mapping[str, Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> dict[str, dict]:
    """By group: the mean of each figure that all its tasks have, with its standard error.

    results: by task, `{"metric,filter": value, "metric_stderr,filter": error}`.
    """
    found = {}
    for name, tasks in members(evaluations).items():
        shares = [one.count if one.weighted else 1 for one in tasks]
        shares = [share / sum(shares) for share in shares]
        found[name] = {"alias": name}
        for figure in results[tasks[0].task]:
            values = [results[one.task].get(figure) for one in tasks]
            if "," not in figure or "_stderr," in figure or None in values:
                continue
            metric, _, filtered = figure.partition(",")
            error = f"{metric}_stderr,{filtered}"
            errors = [results[one.task].get(error) for one in tasks]
            found[name][figure] = sum(share * value for share, value in zip(shares, values, strict=True))
            found[name][error] = (
                None if None in errors else sqrt(sum((w * e) ** 2 for w, e in zip(shares, errors, strict=True)))
            )
    return found
