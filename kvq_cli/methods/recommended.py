"""Option values that were measured to be better than the defaults, from `recommended.json` (docs/SETTINGS.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FILE = "recommended.json"


@dataclass(frozen=True)
class Recommendation:
    """A change of the defaults that lowers the KL divergence to the uncompressed model at the same measured bits.

    change:      `option=value`, or several joined by `:`.
    kl:          change of KL beside the defaults at the same bits, as a fraction of it; low, high: 95 % interval.
    bits, default_bits: measured bits per cached number, with the change and without.
    model, windows, tokens: what it was measured on: a model, and so many windows of so many tokens.
    """

    change: str
    kl: float
    low: float
    high: float
    bits: float
    default_bits: float
    model: str
    windows: int
    tokens: int

    def __str__(self) -> str:
        same = f"{self.bits:.2f}" == f"{self.default_bits:.2f}"
        bits = "" if same else f" ({self.bits:.2f} instead of {self.default_bits:.2f})"
        return (
            f"on {self.model}, {self.change}: KL {100 * self.kl:+.0f} % (95 %: {100 * self.low:+.0f} to "
            f"{100 * self.high:+.0f}) at the same measured bits{bits}"
        )


def recommended(method: str) -> list[Recommendation]:
    """The recommendations for a method, the greatest gain first; empty where none is better beyond chance."""
    return [Recommendation(**entry) for entry in _document().get(method, [])]


@cache
def _document() -> dict[str, list[dict[str, Any]]]:
    return json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
