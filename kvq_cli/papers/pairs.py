"""Pairs of rows of a target's table, compared window by window or answer by answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """Two rows of the table of `target`; `row` is the one that a paper calls better. metric: LOSS, KL or SCORE."""

    target: str
    row: str
    other: str
    metric: str

    def difference(self, model: str, root: Path = ROOT) -> Difference | None:
        """`row` - `other` over the same windows of all texts, or answers of all tasks; None where their scores are not
        below `root`."""
        measured = target(self.target)
        folder = measured.folder(model, root)
        scores = read_scores(folder)
        if scores is None or state(measured, model, root) not in JUDGED:
            return None
        methods = json.loads(measured.result(model, root).read_text(encoding="utf-8"))["methods"]
        labels = row_labels(measured.rows(model), methods)
        row, other = (self._values(scores.get(labels.get(each, ""), {})) for each in (self.row, self.other))
        if not row or {name: len(values) for name, values in row.items()} != {n: len(v) for n, v in other.items()}:
            return None
        return paired(*([x for name in row for x in values[name]] for values in (row, other)))

    def favors(self, difference: Difference) -> bool:
        """Whether the interval of `difference` says that `row` is better."""
        lower = self.metric != SCORE
        return difference.differs and (difference.mean < 0) == lower

    def _values(self, scores: Mapping[str, list[float]]) -> dict[str, list[float]]:
        metrics = {name: name.rpartition(" ")[2] for name in scores}
        wanted = {name for name, one in metrics.items() if (one if one in (LOSS, KL) else SCORE) == self.metric}
        return {name: values for name, values in scores.items() if name in wanted}
