"""The papers' claims, each checked by an expression on result files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli.benchmarking.kernels.targets import results as gpu_results
from kvq_cli.benchmarking.kernels.targets import verdicts
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.methods.registry import build_parsed
from kvq_cli.papers.published import value as published_value
from kvq_cli.papers.run import DONE, GPU_RESULTS, state
from kvq_cli.papers.targets import ROOT, Target, target, targets

HOLDS, FAILS, NOT_MEASURED, HARDWARE = "holds", "does not hold", "not measured", "needs hardware"


@dataclass(frozen=True)
class Claim:
    """One claim; the comment on top of claims.yaml says what its fields mean."""

    paper: str
    source: str
    claim: str
    targets: Sequence[str]
    check: str = ""
    sizes: str = "here"
    gpu: bool = False
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """state: HOLDS, FAILS, NOT_MEASURED or HARDWARE; numbers: name and value of all that the check looked at."""

    claim: Claim
    state: str
    numbers: Mapping[str, float | bool | Sequence[float]] = field(default_factory=dict)


class _Missing(Exception):
    """A result that is not there yet."""


@cache
def claims() -> tuple[Claim, ...]:
    """All claims in the order of the file."""
    import yaml

    document = yaml.safe_load(files(__package__).joinpath("claims.yaml").read_text(encoding="utf-8"))
    return tuple(Claim(**one) for one in document["claims"])


def judge(claim: Claim, model: str, root: Path = ROOT) -> Verdict:
    """Whether a claim holds, by the result files of a model below `root`."""
    results = _Results(model, root)
    try:
        holds = eval(compile(claim.check, claim.claim, "eval"), results.names())  # the package's own file
    except _Missing:
        return Verdict(claim, HARDWARE if claim.gpu else NOT_MEASURED, results.read)
    return Verdict(claim, HOLDS if holds else FAILS, results.read)


class _Results:
    """What an expression may ask for; keeps what it was told in `read`."""

    def __init__(self, model: str, root: Path) -> None:
        self._model, self._root = model, root
        self.read: dict[str, Any] = {}

    def names(self) -> dict[str, Any]:
        own = (self.kvq, self.study, self.number, self.counted, self.published, self.gpu, self.calibrates)
        return {one.__name__: one for one in own} | {"mean": _mean, "share": lambda found: _mean(map(bool, found))}

    def kvq(self, name: str, row: str, column: str = "perplexity") -> float:
        one = target(name)
        methods = self._finished(one)["methods"]
        # `kvq eval --compare` keeps the order of its methods.
        label = dict(zip(one.rows(self._model), methods, strict=True))[row]
        found = tabulate(methods).column(column)[label].value
        if found is None:
            raise _Missing
        return self._keep(f"{row} {column}", found)

    def study(self, name: str, column: str, **at: Any) -> list[Any]:
        document = self._study(name)
        columns = document["columns"]
        if not {column, *at} <= set(columns):
            raise _Missing
        rows = [row for row in document["rows"] if all(row[columns.index(key)] == value for key, value in at.items())]
        where = " ".join(map(str, at.values()))
        return self._keep(f"{name}: {column} {where}".strip(), [row[columns.index(column)] for row in rows])

    def number(self, name: str, *path: Any) -> Any:
        found = self._study(name)["numbers"]
        for step in path:
            try:
                found = found[step]
            except (KeyError, IndexError, TypeError):
                raise _Missing from None
        return self._keep(f"{name}: {' '.join(map(str, path))}", found)

    def counted(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        place = {"paper": paper, "table": table, "row": row, "column": column, "model": model}
        for one in self._finished(target("sizes-papers")):
            if place.items() <= one.items():
                return self._keep(f"{row} {column} {model}".strip(), one["counted"])
        raise _Missing

    def published(self, paper: str, table: str, row: str, column: str, model: str = "") -> float:
        return self._keep(
            f"{row} {column} {model} (paper)".replace("  ", " "), published_value(paper, table, model, row, column)
        )

    def gpu(self, wanted: str, where: str = "") -> list[float]:
        measured = []
        for place, result in gpu_results(GPU_RESULTS).items():
            for one in verdicts(result):
                if one["target"] == wanted and where in one["where"] and one["measured"] is not None:
                    measured.append(one["measured"])
                    self._keep(f"{wanted}, {one['where']}, {place.name}", one["measured"])
        if not measured:
            raise _Missing
        return measured

    def calibrates(self, text: str) -> bool:
        return self._keep(f"{text} calibrates", build_parsed(text).calibrates)

    def _study(self, name: str) -> Any:
        return self._finished(next(one for one in targets().values() if one.analyze == name))

    def _finished(self, one: Target) -> Any:
        """The document of a target that is done: one that was made with other options says nothing here."""
        if state(one, self._model, self._root) != DONE:
            raise _Missing
        return json.loads(one.result(self._model, self._root).read_text(encoding="utf-8"))

    def _keep(self, name: str, found: Any) -> Any:
        self.read[name] = found
        return found


def _mean(found: Any) -> float:
    found = list(found)
    return sum(found) / len(found)
