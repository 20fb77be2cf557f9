"""Evaluations as a table: rows methods, columns tasks, each cell a mean and its standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.evaluation.lm_eval.names import PREFIX
from kvq_cli.evaluation.settings import PERPLEXITY, RULER

EXACT = "fp16"
#: Titles of perplexity's figures, and the digits that they are printed with.
_PERPLEXITY = {"perplexity": ("perplexity", 3), "kl": ("KL to fp16", 5), "top1": ("top-1", 1)}


@dataclass(frozen=True)
class Column:
    """A figure of each method. task, metric: where it stands in lm-eval's schema; task is empty for what the cache
    takes. better: 1 where higher is better, -1 where lower is, 0 where nothing is best. Shares are shown in percent."""

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
    """value: None where a method has no such figure; error: its standard error, None of a single sample."""

    value: float | None
    error: float | None = None


@dataclass(frozen=True)
class Table:
    """rows: by the method's label, one entry per column, in the unit in which it is shown."""

    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Entry]]

    def column(self, title: str) -> dict[str, Entry]:
        """The entries of a column by label; KeyError names the columns there are."""
        for index, column in enumerate(self.columns):
            if column.title == title:
                return {label: row[index] for label, row in self.rows.items()}
        raise KeyError(f"no column {title!r}; there are: {', '.join(column.title for column in self.columns)}")

    def best(self, index: int) -> set[str]:
        """The labels of the best methods of a column; the uncompressed cache does not take part."""
        better = self.columns[index].better
        found = {
            label: better * row[index].value
            for label, row in self.rows.items()
            if better and label != EXACT and row[index].value is not None
        }
        return {label for label, value in found.items() if len(found) > 1 and value == max(found.values())}

    @property
    def titles(self) -> list[str]:
        return ["method", *(column.title for column in self.columns)]

    def cells(self) -> list[list[Any]]:
        """Rows as they are printed: the label, then `95.0 ±2.3` or a rounded number."""
        return [[label, *map(_shown, self.columns, row)] for label, row in self.rows.items()]


def tabulate(methods: Mapping[str, Mapping]) -> Table:
    """The table of a comparison's documents by label. Bits and bytes are of the evaluation with the longest
    sequences."""
    columns = _columns(methods)
    return Table(columns, {label: [_entry(column, one) for column in columns] for label, one in methods.items()})


def _columns(methods: Mapping[str, Mapping]) -> list[Column]:
    first = next(iter(methods.values()))
    results = first["results"]
    lengths = {metric for task in results for metric in _metrics(results[task]) if metric.split(",")[0].isdigit()}
    found = []
    for task in sorted(results, key=lambda task: (task == PERPLEXITY, task == RULER)):
        for metric in _metrics(results[task]):
            name = metric.removesuffix(",none")
            higher = first["higher_is_better"][task].get(metric.split(",")[0], True)
            if task == PERPLEXITY:
                if name in _PERPLEXITY:
                    title, digits = _PERPLEXITY[name]
                    found.append(Column(title, task, metric, 1 if higher else -1, digits, name == "top1"))
                continue
            title = "ruler mean" if task == RULER else task.removeprefix(PREFIX)
            if len(_metrics(results[task])) > 1 if not name.isdigit() else len(lengths) > 1:
                title += f" {name}"
            found.append(Column(title, task, metric, 1 if higher else -1, 1 if higher else 3, higher))
    found.append(Column("bits", "", "nominal_bits", 0, 2))
    found.append(Column("bits measured", "", "measured_bits", 0, 3))
    found.append(Column("cache KiB", "", "bytes", 0, 1))
    return [*found, Column("x smaller", "", "ratio", 0, 2)]


def _metrics(results: Mapping[str, Any]) -> list[str]:
    return [key for key in results if "," in key and "_stderr," not in key]


def _entry(column: Column, document: Mapping[str, Any]) -> Entry:
    if not column.task:
        if not document["cache"]:
            return Entry(None)
        longest = max(document["cache"], key=lambda name: document["cache"][name]["tokens"])
        value = document["cache"][longest][column.metric]
        return Entry(value / 1024 if column.metric == "bytes" else value)
    found = document["results"].get(column.task, {})
    name, _, filtered = column.metric.partition(",")
    value, error = found.get(column.metric), found.get(f"{name}_stderr,{filtered}")
    if not isinstance(value, (int, float)):
        return Entry(None)
    # lm-eval writes "N/A" for the error of a metric that has none.
    return Entry(column.scale * value, column.scale * error if isinstance(error, (int, float)) else None)


def _shown(column: Column, entry: Entry) -> Any:
    if entry.value is None:
        return None
    if entry.error is None:
        return round(entry.value, column.digits)
    return f"{entry.value:.{column.digits}f} ±{entry.error:.{column.digits}f}"
