"""Pairwise coverage: every value of one axis meets every value of each other axis, in far fewer cases than all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

try:
    from allpairspy import AllPairs
except ModuleNotFoundError:  # on a machine with a GPU: every combination
    AllPairs = None


def parametrize_pairwise(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Mark that runs a test with argument values such that every pair of values of two axes occurs.

    axes: by an argument's name its values, or by several names ("mode, sign") tuples. At least three; two make the
    cross product, as stacked `parametrize` does. The choice is deterministic.
    """
    values = [[v if "," in names else (v,) for v in axis] for names, axis in axes.items()]
    ranges = [list(range(len(axis))) for axis in values]
    chosen = itertools.product(*ranges) if AllPairs is None else AllPairs(ranges)
    cases = [sum((axis[i] for axis, i in zip(values, indices, strict=True)), ()) for indices in chosen]
    return pytest.mark.parametrize(", ".join(axes), cases)
