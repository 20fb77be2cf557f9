"""Find the method that leads each column of a table beyond chance: the one that tables print in bold."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from math import hypot
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.paired import CONFIDENCE, common_samples, sample_scores, student_t
from kvq_cli.evaluation.tabulate import EXACT, Column, Entry, Table

LEADING = "Bold: better than every other compressed cache beyond chance (95 %)."
#: Metric of a table -> end of the name that `sample_scores` gives it. Others have their own name there.
_OF_SAMPLES = {
    "perplexity": " loss",
    "kl": " KL",
    "kl_1": " KL first eighth",
    "kl_8": " KL last eighth",
    "agreement": " greedy tokens alike",
}

Scores = Mapping[str, Mapping[Hashable, float]]  # metric -> sample -> score


def leaders(table: Table, folder: Path, methods: Mapping[str, Mapping[str, Any]]) -> list[set[str]]:
    """Return the label of the leading method of each column, or none.

    A method leads if its mean is the best and its differences from all others exclude zero: paired differences where
    `folder`, of `kvq eval`, still has the same samples of both, else those of independent means with the standard
    errors of the table. The uncompressed cache takes no part. methods: result documents of the table's rows, by label.
    """

    @cache
    def scores(label: str) -> Scores:
        try:
            student_t(1)
            return sample_scores(folder, methods, label)
        except KvqError:  # a clone has the means alone; scipy belongs to an extra
            return {}

    return [_leader(table, index, scores) for index in range(len(table.columns))]


def _leader(table: Table, index: int, scores: Callable[[str], Scores]) -> set[str]:
    best = table.best(index)
    if len(best) != 1:
        return set()
    (first,) = best
    column, entries = table.columns[index], {label: row[index] for label, row in table.rows.items()}
    others = [label for label, entry in entries.items() if label not in (first, EXACT) and entry.value is not None]
    ahead = all(
        _differ(entries[first], entries[label], _samples(column, scores(first)), _samples(column, scores(label)))
        for label in others
    )
    return best if ahead else set()


def _differ(
    first: Entry, second: Entry, of_first: Mapping[Hashable, float], of_second: Mapping[Hashable, float]
) -> bool:
    if of_first and of_first.keys() == of_second.keys():  # else the means are of other samples
        return common_samples(of_first, of_second).differs
    if first.value is None or second.value is None or first.error is None or second.error is None:
        return False
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return abs(first.value - second.value) > quantile * hypot(first.error, second.error)


def _samples(column: Column, scores: Scores) -> Mapping[Hashable, float]:
    """Return the scores behind a column by sample; empty where samples have none, such as RULER's mean."""
    name = column.metric.partition(",")[0]
    if name.isdigit():  # RULER's, named by the length
        return scores.get(f"{column.task}-{name}", {})
    of_samples = _OF_SAMPLES.get(name, f" {column.metric}")
    found = [key for key in scores if re.fullmatch(rf"{re.escape(column.task)}(-\d+)?{re.escape(of_samples)}", key)]
    return scores[found[0]] if len(found) == 1 else {}
