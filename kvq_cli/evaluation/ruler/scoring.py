"""RULER's scores: case-insensitive substring match of the references in the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def clean(answer: str) -> str:
    """Postprocess an answer as RULER does: strip it and replace control characters by line breaks."""
    return _UNPRINTABLE.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Fraction of the references that the answer contains, 0 to 1."""
    return sum(_matches(answer, references)) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if the answer contains any of the references, else 0."""
    return float(any(_matches(answer, references)))


def score(metric: str, answer: str, references: Sequence[str]) -> float:
    """Score a raw answer by `string_match_all` or `string_match_part`, 0 to 1."""
    metrics = {"string_match_all": string_match_all, "string_match_part": string_match_part}
    return metrics[metric](clean(answer), references)


def _matches(answer: str, references: Sequence[str]) -> list[bool]:
    answer = answer.lower()
    return [reference.lower() in answer for reference in references]
