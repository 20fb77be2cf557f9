"""Tabulate evaluations: one row per method, one column per metric, cells with mean and standard error."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import DRIFT, PERPLEXITY
from kvq_cli.evaluation.lm_eval.task_groups import PREFIX
from kvq_cli.evaluation.ruler.tasks import RULER

EXACT = "fp16"  # label of the uncompressed cache
#: Metric of perplexity -> column title, digits. Of several texts the titles of each follow with its name.
_PERPLEXITY_COLUMNS = {"perplexity": ("perplexity", 3), "kl": ("KL to fp16", 5), "top1": ("top-1", 1)}

#: Metric of drift -> column title, digits. Parts of the answer between the first and the last are in results alone.
_DRIFT_COLUMNS = {
    "kl": ("drift KL", 5),
    "kl_1": ("drift KL first eighth", 5),
    "kl_8": ("drift KL last eighth", 5),
    "top1": ("drift top-1", 1),
    "agreement": ("greedy tokens alike", 0),
}
#: Metrics of lm-eval whose best value is 100. Others on that scale, such as some tasks' ROUGE, have values above 1.
_OF_100 = ("bleu", "chrf")


@dataclass(frozen=True)
class Column:
    """One metric of every method.

    task, metric: keys in lm-eval's result schema; task is empty for bits and bytes of the cache.
    better:       1 if higher is better, -1 if lower is better, 0 if neither.
    digits:       decimals shown.
    percent:      the value is a fraction and shown as a percentage.
    """

    title: str
    task: str
    metric: str
    better: int
    digits: int
    percent: bool = False

    @property
    def scale(self) -> int:
        return 100 if self.percent else 1


@dataclass(frozen=True)
class Entry:
    """value: None if the method lacks the metric; error: standard error, None for a single sample."""

    value: float | None
    error: float | None = None


@dataclass(frozen=True)
class Table:
    """rows: by method label, one entry per column, in the unit shown (percent, KiB)."""

    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Entry]]

    def column(self, title: str) -> dict[str, Entry]:
        """Entries of the column with this title, by label; KeyError with the valid titles if there is none."""
        for index, column in enumerate(self.columns):
            if column.title == title:
                return {label: row[index] for label, row in self.rows.items()}
        raise KeyError(f"no column {title!r}; there are: {', '.join(self.titles[1:])}")

    def only(self, titles: Sequence[str]) -> Table:
        """Return the table of these columns, in this order; UsageError for a title that it does not have."""
        known = self.titles[1:]
        if unknown := [title for title in titles if title not in known]:
            raise UsageError(f"--columns: no column {unknown[0]!r}; there are: {', '.join(known)}")
        places = [known.index(title) for title in titles]
        rows = {label: [row[place] for place in places] for label, row in self.rows.items()}
        return Table([self.columns[place] for place in places], rows)

    def best(self, index: int) -> set[str]:
        """Labels of the best methods of a column, the uncompressed cache excluded; empty for fewer than two methods."""
        better = self.columns[index].better
        scores = {
            label: better * value
            for label, row in self.rows.items()
            if better and label != EXACT and (value := row[index].value) is not None
        }
        return {label for label, score in scores.items() if len(scores) > 1 and score == max(scores.values())}

    @property
    def titles(self) -> list[str]:
        return ["method", *(column.title for column in self.columns)]

    def cells(self) -> list[list[Any]]:
        """Rows as printed: the label, then `95.0 ±2.3` or a rounded number per column."""
        return [[label, *map(_format_entry, self.columns, row)] for label, row in self.rows.items()]


def tabulate(documents: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tabulate result documents, given by label. Bits and bytes come from the evaluation with the longest sequences."""
    columns = _columns(documents)
    return Table(columns, {label: [_entry(column, one) for column in columns] for label, one in documents.items()})


def _columns(documents: Mapping[str, Mapping[str, Any]]) -> list[Column]:
    first = next(iter(documents.values()))
    results = first["results"]
    lengths = {metric for task in results for metric in _metrics(results[task]) if metric.split(",")[0].isdigit()}
    columns = []
    for task in sorted(results, key=lambda task: (task == PERPLEXITY, task == RULER)):
        for metric in _metrics(results[task]):
            name = metric.removesuffix(",none")
            higher = first["higher_is_better"][task].get(metric.split(",")[0], True)
            if text := re.fullmatch(f"{PERPLEXITY}(_.+)?", task):
                if name in _PERPLEXITY_COLUMNS:
                    title, digits = _PERPLEXITY_COLUMNS[name]
                    title += (text[1] or "").replace("_", " ", 1)
                    columns.append(Column(title, task, metric, 1 if higher else -1, digits, name == "top1"))
                continue
            if task == DRIFT:
                if name in _DRIFT_COLUMNS:
                    title, digits = _DRIFT_COLUMNS[name]
                    columns.append(Column(title, task, metric, 1 if higher else -1, digits, name == "top1"))
                continue
            title = "ruler mean" if task == RULER else task.removeprefix(PREFIX)
            if len(_metrics(results[task])) > 1 if not name.isdigit() else len(lengths) > 1:
                title += f" {name}"
            percent = is_fraction(documents.values(), task, metric)
            columns.append(Column(title, task, metric, 1 if higher else -1, 1 if higher else 3, percent))
    columns.append(Column("nominal bits", "", "nominal_bits", 0, 2))
    columns.append(Column("measured bits", "", "measured_bits", 0, 3))
    columns.append(Column("cache KiB", "", "bytes", 0, 1))
    return [*columns, Column("x smaller", "", "ratio", 0, 2)]


def is_fraction(documents: Collection[Mapping[str, Any]], task: str, metric: str) -> bool:
    """Whether a metric is a fraction, to be shown in percent: higher is better, and no document has more than 1.

    metric: `name,filter`.
    """
    name = metric.partition(",")[0]
    if name in _OF_100 or not all(one["higher_is_better"].get(task, {}).get(name, True) for one in documents):
        return False
    values = [one["results"].get(task, {}).get(metric) for one in documents]
    return all(value <= 1 for value in values if isinstance(value, (int, float)))


def longest_cache(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cache summary of the task with the longest samples: there windows in full precision weigh least."""
    return max(document["cache"].values(), key=lambda summary: summary["tokens"])


def _metrics(results: Mapping[str, Any]) -> list[str]:
    return [key for key in results if "," in key and "_stderr," not in key]


def _entry(column: Column, document: Mapping[str, Any]) -> Entry:
    if not column.task:
        if not document["cache"]:
            return Entry(None)
        value = longest_cache(document)[column.metric]
        return Entry(value / 1024 if column.metric == "bytes" else value)
    metrics = document["results"].get(column.task, {})
    name, _, filter_name = column.metric.partition(",")
    value, error = metrics.get(column.metric), metrics.get(f"{name}_stderr,{filter_name}")
    if not isinstance(value, (int, float)):
        return Entry(None)
    # lm-eval writes "N/A" where a metric has no standard error.
    return Entry(column.scale * value, column.scale * error if isinstance(error, (int, float)) else None)


def _format_entry(column: Column, entry: Entry) -> Any:
    if entry.value is None:
        return None
    if entry.error is None:
        return round(entry.value, column.digits)
    return f"{entry.value:.{column.digits}f} ±{entry.error:.{column.digits}f}"
