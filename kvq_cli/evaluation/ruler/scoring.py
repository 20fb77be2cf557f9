"""RULER's scores: is the reference a part of the answer, whatever the case?"""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def clean(answer: str) -> str:
    """The answer as RULER compares it: ends stripped, each control character a line break."""
    return _UNPRINTABLE.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """The fraction of the references that the answer contains (one sample, 0 to 1)."""
    return sum(_matches(answer, references)) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 where the answer contains any of the references, else 0 (one sample)."""
    return float(any(_matches(answer, references)))


def score(metric: str, answer: str, references: Sequence[str]) -> float:
    """Score a raw answer by the metric of that name."""
    return {"string_match_all": string_match_all, "string_match_part": string_match_part}[metric](
        clean(answer), references
    )


def _matches(answer: str, references: Sequence[str]) -> list[bool]:
    answer = answer.lower()
    return [reference.lower() in answer for reference in references]
