"""Attention over cached layer inputs by the kernels against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks.rematerialize import CHANNEL, TOKEN, Case
from kernel_cases import dense
from kvq_kernels.rematerialize import rematerialize
from tiers import slow, slow_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [[1], *slow([7], [31, 32, 33], [300, 5, 129])])
@pytest.mark.parametrize("keys", [CHANNEL, *slow(TOKEN, dense)], ids=["channel", "token", "dense"])
def test_lengths(keys, lengths):
    values = dense if keys is dense else TOKEN
    Case(lengths, keys, values, sinks=3, unpacked=2).check()


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("seed", [1, *slow(2)])
def test_types(dtype, seed):
    Case([150, 40], dtype=dtype, unpacked=9, bias=True, seed=seed).check()


@pytest.mark.parametrize("bits", [1, *slow(2, 3, 4, 8)])
@pytest.mark.parametrize("rank", [64, *slow(80)])
def test_bits(bits, rank):
    """80 channels do not fill their words at 1 and 3 bits."""
    keys, values = (partial(make, bits=bits, group=16) for make in (CHANNEL, TOKEN))
    Case([150], keys, values, rank=rank, flush=16).check()


@pytest.mark.parametrize("dim", [16, *slow(64, 80, 96, 128)])
def test_head_dims(dim):
    Case([70], rank=128, dim=dim).check()


@pytest.mark.parametrize(("heads", "group"), [(2, 1), *slow_cases((2, 4), (1, 8), (2, 3))])
def test_query_heads(heads, group):
    Case([100, 64], heads=heads, group=group, unpacked=4).check()


@pytest.mark.parametrize(
    "style_and_width", [("half", 16), *slow(("interleaved", 32), ("interleaved", 16), (None, None))]
)
def test_rotations(style_and_width):
    style, rotated = style_and_width
    Case([100, 40], rope=style, rotated=rotated, offset=3 if style else 0, sinks=2, unpacked=4).check()


@pytest.mark.parametrize("norm", ["rms", *slow("layer")])
@pytest.mark.parametrize("dim", [32, *slow(80)])
def test_norms(norm, dim):
    Case([100], heads=2, dim=dim, norm=norm, bias=True, sinks=2, unpacked=4).check()


def test_keys_and_values_share_a_store():
    Case([150, 33], TOKEN, shared=True, heads=2, group=1, unpacked=3).check()


def test_ranks_may_differ():
    Case([100], rank=48, value_rank=96).check()


@pytest.mark.parametrize("bits", [2, *slow(3)])
def test_first_channel(bits):
    Case([100], partial(CHANNEL, bits=bits), rank=64, first=True, sinks=2, unpacked=4).check()


@pytest.mark.parametrize(("group", "flush"), [(128, 128), *slow_cases((8, 8), (48, 48))])
def test_groups_of_tokens(group, flush):
    Case([300, 90], partial(CHANNEL, group=group), flush=flush, unpacked=4).check()


@pytest.mark.parametrize("group", [8, *slow(64)])
def test_groups_of_channels(group):
    Case([100], partial(TOKEN, group=group), partial(TOKEN, group=group)).check()


@pytest.mark.parametrize(("span", "splits"), [(128, 1), *slow_cases((256, 5), (1024, 3))])
def test_spans_and_splits(span, splits):
    Case([300, 140], sinks=2, unpacked=4).check(span, splits)


@pytest.mark.parametrize("window", [1, *slow(20, 100)])
def test_sliding_windows(window):
    Case([140, 7], sinks=2, unpacked=4, window=window).check()


def test_empty_row_is_zero():
    case = Case([0, 40], bias=True)
    assert (case.run()[0] == 0).all()
    case.check()


def test_workspace_is_optional():
    case = Case([100])
    args = (case.query, case.keys, case.values, case.lengths, case.scaling)
    out = rematerialize(*args, rope=case.rope, backend="triton")
    torch.testing.assert_close(out, case.run(), atol=1e-3, rtol=1e-3)


def test_shapes_that_do_not_fit_are_refused():
    case = Case([100], norm="rms")
    with pytest.raises(ValueError, match="lengths"):
        rematerialize(case.query, case.keys, case.values, case.lengths[:0], case.scaling)
    with pytest.raises(ValueError, match="query heads"):
        rematerialize(case.query[:, :, :24], case.keys, case.values, case.lengths, case.scaling)
    with pytest.raises(ValueError, match="neither a norm"):
        rematerialize(case.query, case.values, case.keys, case.lengths, case.scaling)
