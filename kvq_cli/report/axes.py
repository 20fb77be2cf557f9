"""Scales of plots: positions and ticks of linear and logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

#: Mantissas of logarithmic ticks, from few to many ticks per decade.
_MANTISSAS = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9))
_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Axis:
    """A scale from `low`..`high` in data units to `start`..`end` in pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, log: bool = False, margin: float = 0.06) -> Axis:
        """An axis that contains all values, with a margin at both ends; logarithmic only if all are positive."""
        log = log and min(values) > 0
        low, high = (log10(edge) if log else edge for edge in (min(values), max(values)))
        spare = margin * (high - low) or (0.1 if log else abs(high) * 0.1 or 1.0)
        low, high = low - spare, high + spare
        return cls(10**low if log else low, 10**high if log else high, start, end, log)

    def at(self, value: float) -> float:
        """The position of a value in pixels; values outside of the axis are placed at its ends."""
        value = min(max(value, self.low), self.high)
        low, high, value = (log10(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values on the axis, about `count` of them."""
        if self.log:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for mantissas in _MANTISSAS:
                values = [m * 10.0**decade for decade in decades for m in mantissas]
                inside = [value for value in values if self.low <= value <= self.high]
                if count - 2 <= len(inside) <= count + 1:
                    return inside
            if self.high / self.low > 10 ** (count + 3):
                return [10.0**decade for decade in decades[:: ceil(len(decades) / count)]][1:]
        rough = (self.high - self.low) / count
        power = 10.0 ** floor(log10(rough))
        step = next(each * power for each in _STEPS if each * power >= rough * 0.999)
        first = ceil(self.low / step)
        return [round(index * step, 12) for index in range(first, floor(self.high / step) + 1)]


def tick_text(value: float) -> str:
    """A tick's label: `0.05`, `12.5`, `1e+06`."""
    return f"{value:.4g}"
