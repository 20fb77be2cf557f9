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
    kl:          KL beside the default's at the same bits, less 1; low, high: 95 % interval.
    bits, long_bits: bits per cached number more than with the default, in the measured windows and at `long` tokens.
    long_only:   a gain at the bits of `long` tokens alone; in the measured windows it is not worth its bits.
    model, windows, tokens: what it was measured on: a model, and so many windows of so many tokens.
    """

    change: str
    kl: float
    low: float
    high: float
    bits: float
    long_bits: float
    long_only: bool
    model: str
    windows: int
    tokens: int
    long: int

    def __str__(self) -> str:
        where = f"at equal bits of {self.long:,} tokens" if self.long_only else "at equal bits"
        return (
            f"on {self.model}, {self.change}: KL {100 * self.kl:+.0f} % (95 %: {100 * self.low:+.0f} to "
            f"{100 * self.high:+.0f}) {where} ({self.cost})"
        )

    @property
    def cost(self) -> str:
        """The bits more at both lengths, as text."""
        bits, long_bits = (f"{more:+.2f}".replace("-0.00", "+0.00") for more in (self.bits, self.long_bits))
        if bits == long_bits == "+0.00":
            return "no more bits"
        return f"{bits} bits at {self.tokens:,} tokens, {long_bits} at {self.long:,}"


def recommended(method: str) -> list[Recommendation]:
    """The recommendations for a method, the greatest gain first; empty where none is better beyond chance."""
    return [Recommendation(**entry) for entry in _document().get(method, [])]


@cache
def _document() -> dict[str, list[dict[str, Any]]]:
    return json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
