"""Pairwise coverage: every value of one axis meets every value of each other axis, in far fewer cases than all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

try:
    from allpairspy import AllPairs
except ModuleNotFoundError:  # on a machine with a GPU: every combination
    AllPairs = None


def parametrize_pairwise(**axes: Iterable[object]) -> pytest.MarkDecorator:
    """Mark that runs a test with argument values such that every pair of values of two arguments occurs.

    axes: at least three arguments with their values; two make the cross product, as stacked `parametrize` does. The
    choice is deterministic. A value that is a `pytest.param` keeps its id, not its marks.
    """
    values = [list(axis) for axis in axes.values()]
    ranges = [list(range(len(axis))) for axis in values]
    indices = itertools.product(*ranges) if AllPairs is None else AllPairs(ranges)
    cases = [[axis[i] for axis, i in zip(values, case, strict=True)] for case in indices]
    return pytest.mark.parametrize(list(axes), cases)
