"""Rank methods by paired differences of KL, and set them beside `klt` at equal measured bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.paired import Difference, paired
from kvq_cli.evaluation.plot import divergence, measured_bits
from kvq_cli.evaluation.tabulate import EXACT, tabulate
from kvq_cli.papers.scores import Scores, read_scores

BASELINE = "kivi-2bit"
KLT = "klt-"
COLUMNS = (
    "method",
    "rank",
    "measured bits",
    "KL to fp16",
    f"KL beside {BASELINE}'s",
    "KL over klt's at these bits",
    "perplexity",
    "top-1",
)


@dataclass(frozen=True)
class Row:
    """A method's result document and the KL of each window; none of them where only its means are known."""

    label: str
    result: Mapping[str, Any]
    windows: Sequence[float]

    @property
    def kl(self) -> float:
        return divergence(self.result) or 0.0

    @property
    def bits(self) -> float:
        """Bits measured per cached number."""
        return measured_bits(self.result) or 0.0

    def beside(self, other: Row) -> Difference | None:
        """Return the paired difference of KL, this one's less the other's."""
        return paired(self.windows, other.windows) if self.windows and other.windows else None


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a comparison's folder without the uncompressed cache's, the lowest KL first."""
    methods = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["methods"]
    scores: Scores = read_scores(folder) or {}
    windows = {
        label: [kl for title, values in scores.get(label, {}).items() if title.endswith(" KL") for kl in values]
        for label in methods
    }
    rows = [Row(label, result, windows[label]) for label, result in methods.items() if label != EXACT]
    return sorted(rows, key=lambda row: row.kl)


def ranked(rows: Sequence[Row], everything: Sequence[Row]) -> list[list[Any]]:
    """Return the table of `rows`, ranked among themselves. everything: with the baseline and all rows of `klt`."""
    (baseline,) = (row for row in everything if row.label == BASELINE)
    curve = sorted((row for row in everything if row.label.startswith(KLT)), key=lambda row: row.bits)
    return [_line(row, rows, baseline, curve) for row in rows]


def _line(row: Row, rows: Sequence[Row], baseline: Row, curve: Sequence[Row]) -> list[Any]:
    cells = tabulate({row.label: row.result})
    shown = dict(zip(cells.titles, cells.cells()[0], strict=True))
    scores = (shown[title] for title in ("perplexity", "top-1"))
    kl = shown["KL to fp16"]
    return [row.label, _rank(row, rows), f"{row.bits:.2f}", kl, _percent(row, baseline), over_klt(row, curve), *scores]


def _rank(row: Row, rows: Sequence[Row]) -> str:
    """Return the first and last rank that the paired intervals leave a method; empty without them."""
    found = [difference for other in rows if other is not row and (difference := row.beside(other)) is not None]
    if not found:
        return ""
    best = 1 + sum(difference.differs and difference.mean > 0 for difference in found)
    worst = 1 + len(found) - sum(difference.differs and difference.mean < 0 for difference in found)
    return str(best) if best == worst else f"{best}-{worst}"


def _percent(row: Row, baseline: Row) -> str:
    """Return the difference of KL to the baseline's, in percent of it, with its interval."""
    difference = row.beside(baseline)
    if row is baseline or difference is None or difference.low is None or difference.high is None:
        return ""
    mean, low, high = (100 * each / baseline.kl for each in (difference.mean, difference.low, difference.high))
    return f"{mean:+.0f} % [{low:+.0f}, {high:+.0f}]{' *' if difference.differs else ''}"


def over_klt(row: Row, curve: Sequence[Row]) -> str:
    """Return a method's KL as a multiple of klt's at as many measured bits: `4.1`.

    curve: rows of klt by rising bits; between two of them ln KL is a straight line. Beyond the last, which has fewer
    bits, the ratio is a lower bound: `> 4.1`; below the first an upper one: `< 4.1`. Empty for klt itself.
    """
    if row in curve or not curve:
        return ""
    first, last = curve[0], curve[-1]
    if row.bits >= last.bits:
        return f"> {row.kl / last.kl:.1f}"
    if row.bits < first.bits:
        return f"< {row.kl / first.kl:.1f}"
    low, high = next((low, high) for low, high in zip(curve, curve[1:], strict=False) if row.bits < high.bits)
    share = (row.bits - low.bits) / (high.bits - low.bits)
    return f"{row.kl / math.exp((1 - share) * math.log(low.kl) + share * math.log(high.kl)):.1f}"
