"""The papers' claims, each checked by an expression over result files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli.benchmarking.kernels.performance_targets import compare_with_targets, load_gpu_results
from kvq_cli.evaluation.paired import Difference
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import REFERENCE
from kvq_cli.papers.pairs import Pair
from kvq_cli.papers.published import value as published_value
from kvq_cli.papers.run import GPU_RESULTS, JUDGED, state
from kvq_cli.papers.settings import Effect, Sweep, load_sweep
from kvq_cli.papers.side_by_side import row_labels
from kvq_cli.papers.targets import ROOT, Target, target, targets

HOLDS, FAILS, NOT_MEASURED, HARDWARE = "holds", "does not hold", "not measured", "needs hardware"
#: The check is true, but proves little: see `Claim.chance` and `Claim.paired`.
BY_CHANCE = "holds?"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper; the comment at the top of claims.yaml explains the fields."""

    paper: str
    source: str
    claim: str
    targets: Sequence[str]
    check: str = ""
    sizes: str = "here"
    gpu: bool = False
    why: str | Mapping[str, str] = ""
    chance: Mapping[str, str] = field(default_factory=dict)
    paired: Sequence[Pair] = ()
    beside: Sequence[Pair] = ()
    tried: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def reason(self, model: str) -> str:
        """Why the claim does not hold on this model; empty where no reason is given."""
        if isinstance(self.why, str):
            return self.why if model == REFERENCE or self.sizes == "any" else ""
        return self.why.get(model, "")

    def measured_reasons(self, model: str, root: Path = ROOT) -> list[tuple[Sweep, Effect]]:
        """What other settings of the methods are worth on this model, as far as their sweeps were measured."""
        sweeps = {name: load_sweep(target(name), model, root) for name in self.tried}
        found = [
            (sweep, sweep.effect(change)) for name, sweep in sweeps.items() if sweep for change in self.tried[name]
        ]
        return [(sweep, effect) for sweep, effect in found if effect is not None]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds. state: HOLDS, BY_CHANCE, FAILS, NOT_MEASURED or HARDWARE; numbers: every result that its
    check read, by name; differences: of the claim's pairs, by name, as far as their scores are here."""

    claim: Claim
    state: str
    numbers: Mapping[str, float | bool | Sequence[float]] = field(default_factory=dict)
    differences: Mapping[str, Difference] = field(default_factory=dict)


class _MissingResult(Exception):
    """A result that a check needs has not been measured."""


@cache
def claims() -> tuple[Claim, ...]:
    """All claims in the order of claims.yaml."""
    import yaml

    document = yaml.safe_load(files(__package__).joinpath("claims.yaml").read_text(encoding="utf-8"))
    return tuple(map(_claim, document["claims"]))


def _claim(entry: Mapping[str, Any]) -> Claim:
    pairs: dict[str, Any] = {
        name: [Pair(*pair) for pair in entry[name]] for name in ("paired", "beside") if name in entry
    }
    return Claim(**{**entry, **pairs})


def judge(claim: Claim, model: str, root: Path = ROOT) -> Verdict:
    """Whether a claim holds, according to a model's result files below `root`."""
    results = _Results(model, root, named=len(claim.targets) > 1)
    try:
        # eval: checks come from claims.yaml in this package, never from a user.
        holds = eval(compile(claim.check, claim.claim, "eval"), results.functions())
    except _MissingResult:
        return Verdict(claim, HARDWARE if claim.gpu else NOT_MEASURED, results.read)
    doubtful = model in claim.chance
    differences: dict[str, Difference] = {}
    for pair in (*claim.paired, *claim.beside):
        if (difference := pair.difference(model, root)) is not None:
            where = f"{pair.target}: " if len(claim.targets) > 1 else ""
            differences[f"{where}{pair.row} - {pair.other}, {pair.metric}"] = difference
            doubtful |= pair in claim.paired and not pair.favors(difference)
    return Verdict(claim, (BY_CHANCE if doubtful else HOLDS) if holds else FAILS, results.read, differences)


class _Results:
    """The functions that a check may call. Every result that they return is recorded in `read`."""

    def __init__(self, model: str, root: Path, named: bool = False) -> None:
        self._model, self._root, self._named = model, root, named
        self.read: dict[str, Any] = {}

    def functions(self) -> dict[str, Any]:
        """Name -> function, as the comment at the top of claims.yaml lists them."""
        methods = (self.kvq, self.study, self.number, self.counted, self.published, self.gpu, self.calibrates)
        by_name = {method.__name__: method for method in methods}
        return by_name | {
            "mean": _mean,
            "share": lambda conditions: _mean(map(bool, conditions)),
            "all": lambda conditions: all(list(conditions)),  # reads every result, so that all are recorded
            "rising": lambda *values: list(values) == sorted(set(values)),
        }

    def kvq(self, name: str, row: str, column: str = "perplexity") -> float:
        evaluated = target(name)
        methods, rows = self._finished(evaluated)["methods"], evaluated.rows(self._model)
        if row not in rows:
            raise KeyError(f"{name} has no row {row!r}")
        labels = row_labels(rows, methods)
        # No label: the method left the dtype's range. The label of two rows, which differ in windows alone: one did.
        if row not in labels or list(labels.values()).count(labels[row]) > 1:
            raise _MissingResult
        table = tabulate(methods)
        if column not in table.titles:  # the tasks depend on the model's size
            raise _MissingResult
        value = table.column(column)[labels[row]].value
        if value is None:
            raise _MissingResult
        return self._record(f"{name}: {row} {column}" if self._named else f"{row} {column}", value)

    def study(self, name: str, column: str, **at: Any) -> list[Any]:
        document = self._study(name)
        columns = document["columns"]
        if not {column, *at} <= set(columns):
            raise _MissingResult
        rows = [row for row in document["rows"] if all(row[columns.index(key)] == value for key, value in at.items())]
        where = " ".join(map(str, at.values()))
        return self._record(f"{name}: {column} {where}".strip(), [row[columns.index(column)] for row in rows])

    def number(self, name: str, *path: Any) -> Any:
        value = self._study(name)["numbers"]
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise _MissingResult from None
        return self._record(f"{name}: {' '.join(map(str, path))}", value)

    def counted(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        wanted = {"paper": paper, "table": table, "row": row, "column": column, "model": model}
        for size in self._finished(target("sizes-papers")):
            if wanted.items() <= size.items():
                return self._record(f"{row} {column} {model}".strip(), size["counted"])
        raise _MissingResult

    def published(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        return self._record(
            f"{row} {column} {model} (paper)".replace("  ", " "), published_value(paper, table, model, row, column)
        )

    def gpu(self, wanted: str, where: str = "") -> list[float]:
        measured = []
        for folder, result in load_gpu_results(GPU_RESULTS).items():
            for verdict in compare_with_targets(result):
                if verdict["target"] == wanted and where in verdict["where"] and verdict["measured"] is not None:
                    measured.append(verdict["measured"])
                    self._record(f"{wanted}, {verdict['where']}, {folder.name}", verdict["measured"])
        if not measured:
            raise _MissingResult
        return measured

    def calibrates(self, text: str) -> bool:
        return self._record(f"{text} calibrates", build_parsed(text).calibrates)

    def _study(self, name: str) -> Any:
        return self._finished(next(each for each in targets().values() if each.analyze == name))

    def _finished(self, wanted: Target) -> Any:
        """The result document of a finished target; a result that was made with other options counts as missing."""
        if state(wanted, self._model, self._root) not in JUDGED:
            raise _MissingResult
        return json.loads(wanted.result(self._model, self._root).read_text(encoding="utf-8"))

    def _record(self, name: str, value: Any) -> Any:
        self.read[name] = value
        return value


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
