"""The results that expressions in claims.yaml read: checks of claims, and the numbers of their reasons."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from kvq_cli.benchmarking.kernels.performance_targets import measured_rows
from kvq_cli.evaluation.paired import Difference
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.methods.registry import build_parsed
from kvq_cli.papers.published import value as published_value
from kvq_cli.papers.run import GPU_RESULTS, JUDGED, state
from kvq_cli.papers.side_by_side import row_labels
from kvq_cli.papers.targets import Target, target, targets
from lab.claims.pairs import Pair


class MissingResult(Exception):
    """A result that an expression reads has not been measured."""


class Results:
    """The functions that an expression may call. Every result that they return is recorded in `read`."""

    def __init__(self, model: str, root: Path, named: bool = False) -> None:
        self._model, self._root, self._named = model, root, named
        self.read: dict[str, Any] = {}

    def functions(self) -> dict[str, Any]:
        """Name -> function, as the comment at the top of claims.yaml lists them."""
        measured = (self.kvq, self.study, self.number, self.paired, self.gpu)
        methods = (*measured, self.counted, self.published, self.calibrates)
        by_name = {method.__name__: method for method in methods}
        return by_name | {
            "mean": _mean,
            "median": median,
            "log": math.log,
            "span": _Span,
            "share": lambda conditions: _mean(map(bool, conditions)),
            "all": lambda conditions: all(list(conditions)),  # reads every result, so that all are recorded
            "rising": lambda *values: list(values) == sorted(set(values)),
        }

    def evaluate(self, expression: str) -> Any:
        """The value of a Python expression of claims.yaml; MissingResult if it reads a result that is not here."""
        # eval: expressions come from claims.yaml in this package, never from a user.
        return eval(expression, self.functions())

    def fill(self, text: str) -> str:
        """`text` with the values of its `{expressions}`, formatted as in an f-string."""
        return str(self.evaluate(f'f"""{text}"""'))

    def kvq(self, name: str, row: str, column: str = "perplexity") -> float:
        evaluated = target(name)
        methods, rows = self._finished(evaluated)["methods"], evaluated.rows(self._model)
        labels = row_labels(rows, methods)
        if row not in rows:  # a label, as of the uncompressed cache or of a target that a configuration lists
            if row not in methods:
                raise KeyError(f"{name} has no row {row!r}")
            labels = {row: row}
        # No label: the method left the dtype's range. The label of two rows, which differ in windows alone: one did.
        if row not in labels or list(labels.values()).count(labels[row]) > 1:
            raise MissingResult
        table = tabulate(methods)
        if column not in table.titles:  # the tasks depend on the model's size
            raise MissingResult
        value = table.column(column)[labels[row]].value
        if value is None:
            raise MissingResult
        return self._record(f"{name}: {row} {column}" if self._named else f"{row} {column}", value)

    def study(self, name: str, column: str, **at: Any) -> list[Any]:
        document = self._study(name)
        columns = document["columns"]
        if not {column, *at} <= set(columns):
            raise MissingResult
        rows = [row for row in document["rows"] if all(row[columns.index(key)] == value for key, value in at.items())]
        where = " ".join(map(str, at.values()))
        return self._record(f"{name}: {column} {where}".strip(), [row[columns.index(column)] for row in rows])

    def number(self, name: str, *path: Any) -> Any:
        value = self._study(name)["numbers"]
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise MissingResult from None
        return self._record(f"{name}: {' '.join(map(str, path))}", value)

    def counted(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        wanted = {"paper": paper, "table": table, "row": row, "column": column, "model": model}
        for size in self._finished(target("sizes-papers")):
            if wanted.items() <= size.items():
                return self._record(f"{row} {column} {model}".strip(), size["counted"])
        raise MissingResult

    def published(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        return self._record(
            f"{row} {column} {model} (paper)".replace("  ", " "), published_value(paper, table, model, row, column)
        )

    def gpu(self, wanted: str, where: str = "") -> list[float]:
        measured = [
            self._record(f"{wanted}, {row['where']}, {folder}", row["measured"])
            for folder, row in measured_rows(GPU_RESULTS, wanted, where)
        ]
        if not measured:
            raise MissingResult
        return measured

    def paired(self, name: str, row: str, other: str, metric: str, against: str = "") -> Difference:
        difference = Pair(name, row, other, metric, against).difference(self._model, self._root)
        if difference is None:
            raise MissingResult
        return difference

    def calibrates(self, text: str) -> bool:
        return self._record(f"{text} calibrates", build_parsed(text).calibrates)

    def _study(self, name: str) -> Any:
        return self._finished(next(each for each in targets().values() if each.analyze == name))

    def _finished(self, wanted: Target) -> Any:
        """The result document of a finished target; a result that was made with other options counts as missing."""
        if state(wanted, self._model, self._root) not in JUDGED:
            raise MissingResult
        return json.loads(wanted.result(self._model, self._root).read_text(encoding="utf-8"))

    def _record(self, name: str, value: Any) -> Any:
        self.read[name] = value
        return value


class _Span:
    """The least and the greatest of `values`: `f"{_Span([2, 1]):.1f}"` is `1.0 to 2.0`."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = list(values)

    def __format__(self, spec: str) -> str:
        return f"{min(self._values):{spec}} to {max(self._values):{spec}}"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
