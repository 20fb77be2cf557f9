"""Scores of each window or answer of a target's methods.

They are in the repository, where the samples that they are taken from are not: a clone prints the same intervals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvq_cli.evaluation.paired import sample_scores
from kvq_cli.files import write_text
from kvq_cli.papers.compact import compact_text

SCORES = "scores.json"

Scores = Mapping[str, Mapping[str, list[float]]]


def write_scores(folder: Path, methods: Mapping[str, Mapping]) -> None:
    """Write `scores.json`: the scores of each text's windows or task's answers, by label and metric, in their order."""
    scores = {
        label: {
            metric: list(values.values())
            for metric, values in sample_scores(folder, methods, label).items()
            if all(isinstance(index, int) for index in values)
        }
        for label in methods
    }
    write_text(folder / SCORES, compact_text(scores))


def read_scores(folder: Path) -> Scores | None:
    """The content of `scores.json`; None where an earlier version of kvq, or another run, left none."""
    try:
        return json.loads((folder / SCORES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
