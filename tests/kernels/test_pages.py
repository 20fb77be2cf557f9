"""Decode attention over pages: bit for bit what it is over rows that are one run of memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import CHANNEL, HALF, TEMPORAL, Case, codebook, dense, per_head, random_outliers, scalars, uniform
from paged_cases import paged

pytestmark = pytest.mark.gpu

KIVI = (partial(uniform, axis="channel"), partial(uniform, axis="token"))
HYBRID = tuple(partial(uniform, axis=axis, mode="hybrid-extra") for axis in ("token", "channel"))
POOLED = partial(random_outliers, capacity=70, pooled=True)
PER_HEAD = (
    partial(per_head, makers=TEMPORAL[:1] + CHANNEL[:1], heads=((0, 2), (1,))),
    partial(per_head, makers=CHANNEL[:1] + TEMPORAL[1:], heads=((1,), (0, 2))),
)
WINDOWS = {"unpacked": (12, 20), "sinks": 4}
#: family -> (keys, values, options of the case).
FAMILIES = {
    "dense": (dense, dense, {"group": 1}),
    "kivi": (*KIVI, {"heads": 2, **WINDOWS}),
    "innerq": (*HYBRID, {"group": 3, "norm": True, **WINDOWS}),
    "temporal": (*TEMPORAL, {"outliers": (random_outliers, random_outliers), **HALF, **WINDOWS}),
    "channel": (*CHANNEL, HALF),
    "kvquant": (*scalars(2), {"heads": 2, "outliers": (random_outliers, POOLED), **HALF, **WINDOWS}),
    "per-head": (*PER_HEAD, {"heads": 3, "outliers": (random_outliers, random_outliers), **HALF, **WINDOWS}),
    "rotated": (*KIVI, {"rope": ("interleaved", 32), "window": 90}),
    "mixed": (scalars(3)[0], codebook, HALF),
}


def check(family: str, lengths: list[int], block_size: int, cells: int = 1, shared: int = 0) -> None:
    keys, values, options = FAMILIES[family]
    plain, case = paged(Case(keys, values, lengths, **options), block_size, cells, shared)
    assert torch.equal(case.run(), plain.run())
    assert torch.equal(case.reference(torch.float64), plain.reference(torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_equal_rows(family):
    check(family, [0, 129], 128)
