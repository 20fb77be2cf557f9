"""Paired differences between two rows of a target's table, window by window or answer by answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvq_cli.evaluation.paired import Difference, paired
from kvq_cli.papers.run import JUDGED, state
from kvq_cli.papers.scores import read_scores
from kvq_cli.papers.side_by_side import row_labels
from kvq_cli.papers.targets import ROOT, target

#: What rows may be compared by: loss and KL in nats per token, RULER's scores in percent.
LOSS, KL, SCORE = "loss", "KL", "score"


def row_difference(name: str, model: str, row: str, other: str, metric: str, root: Path = ROOT) -> Difference | None:
    """`row` - `other` of a target, paired by window or answer over all texts or tasks; None where a row has no scores.

    metric: LOSS or KL (nats per token), or SCORE (percent).
    """
    measured = target(name)
    folder = measured.folder(model, root)
    scores = read_scores(folder)
    if scores is None or state(measured, model, root) not in JUDGED:
        return None
    methods = json.loads(measured.result(model, root).read_text(encoding="utf-8"))["methods"]
    labels = row_labels(measured.rows(model), methods)
    values = [_values(scores.get(labels.get(each, ""), {}), metric) for each in (row, other)]
    if not values[0] or len(values[0]) != len(values[1]):
        return None
    return paired(*values)


def _values(scores: Mapping[str, list[float]], metric: str) -> list[float]:
    """All windows or answers, text by text."""
    names = [name for name in scores if metric == SCORE or name.endswith(f" {metric}")]
    return [value for name in names for value in scores[name]]
