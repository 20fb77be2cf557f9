"""Sinks and recent tokens of decode attention: as exact as float32 sums, wherever they are stored."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import Case, dense, uniform
from kvq_kernels.decode_attention import Tile, decode_attention
from tiers import slow

pytestmark = pytest.mark.gpu

KIVI = (partial(uniform, axis="channel"), partial(uniform, axis="token"))


def error_of_float32_output(case: Case, tile: Tile | None = None) -> float:
    """Relative error of the kernels, without the rounding of the output."""
    out = torch.empty(case.query.shape, dtype=torch.float32)
    args = (case.query, *case.sides, case.lengths, case.scaling)
    decode_attention(*args, rope=case.rope, window=case.window, out=out, backend="triton", tile=tile)
    exact = case.reference(torch.float64)
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("rope", [None, ("half", 64), *slow(("interleaved", 64), ("half", 32))])
@pytest.mark.parametrize("norm", [False, True])
def test_factors_are_not_rounded_to_16_bits(rope, norm):
    """Weights, rotated keys and keys divided by norms are float32: rounded to float16 the error would be 2^-12."""
    case = Case(*KIVI, [90], unpacked=(100, 100), sinks=8, rope=rope, norm=norm)
    assert error_of_float32_output(case) < 2**-18


@pytest.mark.parametrize("sides", [KIVI, (dense, dense)], ids=["kivi", "dense"])
def test_amd_loads_each_place_by_itself(sides):
    """Its compiler cannot select between pointers into several tensors."""
    case = Case(*sides, [5, 60, 90], unpacked=(100, 100), sinks=8)
    assert error_of_float32_output(case, Tile(nvidia=0)) < 2**-18


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 8},
        {"unpacked": (30, 30), "dim": 80},
        {"sinks": 8, "unpacked": (30, 50), "window": 40},
        *slow({"sinks": 8, "unpacked": (300, 300), "window": 200}, {"sinks": 20, "unpacked": (30, 50), "group": 6}),
    ],
)
def test_rest_of_dense_tokens(options):
    """Those behind whole tiles are read as exact ones, too."""
    case = Case(dense, dense, [3, 150, 290], **options)
    assert error_of_float32_output(case) < 2**-10  # whole tiles have float16 weights
    case.check()


def test_short_rows_read_no_packed_token():
    """All tokens of a row are sinks, or sinks and recent ones; packed storage is not read."""
    case = Case(*KIVI, [1, 5, 8, 9, 40], unpacked=(60, 60), sinks=8)
    assert all((side.count == 0).all() for side in case.sides)
    for side in case.sides:
        side.packed.scale.fill_(torch.nan)
    case.check()


def test_dense_tokens_with_a_norm():
    """They are packed ones, not exact ones; without sinks and rings, there are no exact tokens."""
    Case(dense, dense, [150, 9], norm=True).check()
