"""Pairs of rows of a target's table, compared window by window or answer by answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvq_cli.evaluation.paired import Difference, paired
from kvq_cli.papers.run import JUDGED, state
from kvq_cli.papers.scores import read_scores
from kvq_cli.papers.side_by_side import row_labels
from kvq_cli.papers.targets import ROOT, target

#: What rows may be compared by: loss and KL in nats per token, RULER's scores in percent.
LOSS, KL, SCORE = "loss", "KL", "score"


@dataclass(frozen=True)
class Pair:
    """Two rows of the tables of `target` and of `against` (none: the same); `row` is the one that a paper calls better.

    metric: LOSS, KL or SCORE.
    """

    target: str
    row: str
    other: str
    metric: str
    against: str = ""

    def title(self, named: bool) -> str:
        """What is compared, as in `row - other, loss`; named: with the target of each row."""
        where, of_other = (f"{name}: " if named else "" for name in (self.target, self.against))
        return f"{where}{self.row} - {of_other if self.against else ''}{self.other}, {self.metric}"

    def difference(self, model: str, root: Path = ROOT) -> Difference | None:
        """`row` - `other` over the same windows of all texts, or answers of all tasks; None where their scores are not
        below `root`."""
        row = self._scores(self.target, self.row, model, root)
        other = self._scores(self.against or self.target, self.other, model, root)
        if not row or {name: len(values) for name, values in row.items()} != {n: len(v) for n, v in other.items()}:
            return None
        return paired(*([x for name in row for x in values[name]] for values in (row, other)))

    def favors(self, difference: Difference) -> bool:
        """Whether the interval of `difference` says that `row` is better."""
        lower = self.metric != SCORE
        return difference.differs and (difference.mean < 0) == lower

    def _scores(self, name: str, row: str, model: str, root: Path) -> dict[str, list[float]]:
        """The row's scores of `metric`, by text or task; empty where they are not below `root`."""
        measured = target(name)
        scores = read_scores(measured.folder(model, root))
        if scores is None or state(measured, model, root) not in JUDGED:
            return {}
        methods = json.loads(measured.result(model, root).read_text(encoding="utf-8"))["methods"]
        label = row_labels(measured.rows(model), methods).get(row, "")
        return {title: values for title, values in scores.get(label, {}).items() if _metric(title) == self.metric}


def _metric(title: str) -> str:
    """LOSS, KL or SCORE, of a column such as `wikitext2 loss`."""
    metric = title.rpartition(" ")[2]
    return metric if metric in (LOSS, KL) else SCORE
