"""Which parametrized cases `make test` leaves to `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values of one argument, marked slow: `parametrize("bits", [2, *slow(1, 3, 4)])`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Values of several arguments, marked slow: `parametrize(("bits", "dim"), [(2, 64), *slow_cases((4, 128))])`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
