"""Compare `klt` with its goals: 0.35 of the best other method's KL at equal bits, and near fp16 in other scores.

python -m lab.goals.klt RESULTS...    folders of comparisons; writes goals.md and, of KL over measured bits, pareto.png
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.plot import (
    DIVERGENCE,
    divergence,
    lines_by_method,
    measured_bits,
    plot_comparison,
    ruler_mean,
)
from kvq_cli.evaluation.tabulate import EXACT
from kvq_cli.files import write_text

METHOD = "klt"
#: Goals: KL divergence relative to the best other method's; perplexity relative to fp16's, by nominal bits; points of
#: RULER's mean, in percent, below fp16's.
MAX_KL_RATIO = 0.35
MAX_PERPLEXITY_RATIO = {2.0: 1.03, 3.0: 1.005}
MAX_RULER_LOSS = 2.0


@dataclass(frozen=True)
class Reached:
    """One setting of the method beside the best other method.

    other:      the best other method, as a line through all its bits; empty where none has points on both sides.
    other_kl:   its KL at the same measured bits.
    perplexity: ratio to fp16, mean over the texts.
    """

    label: str
    nominal_bits: float
    bits: float
    kl: float
    other: str
    other_kl: float | None
    perplexity: float

    @property
    def ratio(self) -> float | None:
        """KL divergence relative to the best other method's."""
        return None if self.other_kl is None else self.kl / self.other_kl

    def verdicts(self) -> list[str]:
        """Whether each goal that applies is met."""
        found = [] if self.ratio is None else [f"KL {_met(self.ratio <= MAX_KL_RATIO)}"]
        if (most := MAX_PERPLEXITY_RATIO.get(self.nominal_bits)) is not None:
            found.append(f"perplexity {_met(self.perplexity <= most)} (at most {most:g})")
        return found


def reached(methods: Mapping[str, Mapping[str, Any]]) -> list[Reached]:
    """What each setting of the method reached. methods: the documents of a comparison, by label."""
    others = {
        name: sorted(_points(methods[label] for label in labels))
        for name, labels in lines_by_method(methods).items()
        if name != EXACT and not _is_own(name)
    }
    results = []
    for label, document in methods.items():
        kl = divergence(document)
        if not _is_own(label) or kl is None:
            continue
        bits = measured_bits(document)
        rivals = {name: at for name, points in others.items() if (at := interpolated(points, bits)) is not None}
        best = min(rivals, key=lambda name: rivals[name], default="")
        nominal = float(document["config"]["method"]["bits"])
        results.append(Reached(label, nominal, bits, kl, best, rivals.get(best), perplexity_ratio(document)))
    return results


def interpolated(points: list[tuple[float, float]], bits: float) -> float | None:
    """KL at `bits`, linear in log KL between the neighbors of sorted points (bits, KL); None outside of them."""
    for (low, first), (high, second) in zip(points, points[1:], strict=False):
        if low <= bits <= high:
            share = (bits - low) / (high - low) if high > low else 0.0
            return math.exp((1 - share) * math.log(first) + share * math.log(second))
    return None


def perplexity_ratio(document: Mapping[str, Any]) -> float:
    """Perplexity relative to the uncompressed cache's, mean over the texts; the entry of their mean does not count."""
    results = document["results"]
    texts = [each for name, each in results.items() if name.startswith(f"{PERPLEXITY}_")] or [results[PERPLEXITY]]
    ratios = [each["perplexity,none"] / each["perplexity_uncompressed,none"] for each in texts]
    return sum(ratios) / len(ratios)


def goals_table(methods: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the goals' table: of KL and perplexity, or where RULER was measured, of its mean."""
    if all(ruler_mean(document) is not None for document in methods.values()):
        return _ruler_table(methods)
    columns = ["method", "measured bits", "KL", "best other method", "its KL", "ratio", "perplexity x", "goals"]
    rows = []
    for one in reached(methods):
        other = [one.other or "none at these bits", _number(one.other_kl, 4), _number(one.ratio, 2)]
        own = [one.label, _number(one.bits, 2), _number(one.kl, 4)]
        rows.append([*own, *other, _number(one.perplexity, 4), ", ".join(one.verdicts())])
    return columns, rows


def _ruler_table(methods: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Without fp16, which a comparison may have left out, there is no verdict."""
    means = {label: ruler_mean(document) or 0.0 for label, document in methods.items()}
    others = (label for label in methods if label != EXACT and not _is_own(label))
    exact, best = means.get(EXACT), max(others, key=lambda label: means[label], default="")
    rows = []
    for label, document in methods.items():
        if _is_own(label):
            rivals = [_number(exact, 1), best or "none", _number(means.get(best), 1)]
            verdict = ""
            if exact is not None:
                verdict = f"RULER {_met(exact - means[label] <= MAX_RULER_LOSS)} (at most {MAX_RULER_LOSS:g} below)"
            rows.append([label, _number(measured_bits(document), 2), f"{means[label]:.1f}", *rivals, verdict])
    return ["method", "measured bits", "RULER mean", "fp16's", "best other method", "its mean", "goals"], rows


def _points(documents: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    found = [(measured_bits(document), divergence(document)) for document in documents]
    return [(bits, kl) for bits, kl in found if kl is not None]


def _is_own(label: str) -> bool:
    return label.split("-")[0].split(",")[0] == METHOD


def _met(holds: bool) -> str:
    return "met" if holds else "not met"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write_goals(folder: Path) -> None:
    """Write `goals.md`, and `pareto.png` where KL was measured, from the `comparison.json` of `folder`."""
    methods = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["methods"]
    write_text(folder / "goals.md", markdown(*goals_table(methods)) + "\n")
    if any(divergence(document) is not None for document in methods.values()):
        plot_comparison({"methods": methods}, folder / "pareto.png", only=[DIVERGENCE], bold=METHOD)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_goals(Path(name))
