"""Attention over transform codes by the kernels against float64."""

from __future__ import annotations

import pytest
import torch
from checks.transform_attention import JOINED, Case
from kvq_kernels.transform_attention import transform_attention
from tiers import slow, slow_cases

pytestmark = pytest.mark.gpu

#: Three groups of one head, one of which keeps no component.
SPLIT = {2: [5, 0, 9], 8: [1, 0, 0]}


@pytest.mark.parametrize("lengths", [[9], *slow([1], [7], [31, 32, 33], [300, 5, 129])])
@pytest.mark.parametrize("counts", [JOINED, *slow(SPLIT)], ids=["joined", "split"])
def test_lengths(counts, lengths):
    Case(lengths, counts, counts, heads=3, sinks=3, unpacked=2).check()


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("stored", [torch.float16, *slow(torch.bfloat16, torch.float32)])
def test_types(dtype, stored):
    """In those of the model and of the centroids."""
    Case([70, 40], dtype=dtype, stored=stored, unpacked=9).check()


def test_heads_without_components():
    """Their keys and values are the mean."""
    Case([60], SPLIT, SPLIT, heads=3, group=1, sinks=2, unpacked=3).check()


@pytest.mark.parametrize("words", [16, *slow(32, 64)])
def test_steps(words):
    """Chunks of a size that do not fill a step, and more than one step of them."""
    Case([40], {1: [20], 4: [18], 8: [17]}, {2: [33]}, words=words).check()


@pytest.mark.parametrize("dim", [16, *slow(64, 80, 96, 128)])
def test_head_dims(dim):
    Case([40], dim=dim).check()


@pytest.mark.parametrize(("heads", "group"), [(2, 3), *slow_cases((2, 1), (2, 4), (4, 8))])
def test_query_heads(heads, group):
    Case([50, 34], JOINED, heads=heads, group=group, unpacked=4).check()


@pytest.mark.parametrize(
    "style_and_width", [("half", 16), *slow(("interleaved", 32), ("interleaved", 16), (None, None))]
)
def test_rotations(style_and_width):
    style, rotated = style_and_width
    Case([80, 40], rope=style, rotated=rotated, offset=3 if style else 0, sinks=2, unpacked=4).check()


@pytest.mark.parametrize(("span", "splits"), [(64, 1), *slow_cases((128, 5), (1024, 3))])
def test_spans_and_splits(span, splits):
    Case([200, 90], sinks=2, unpacked=20).check(span, splits, 3)


@pytest.mark.parametrize("window", [20, *slow(1, 100)])
def test_sliding_windows(window):
    Case([140, 7], sinks=2, unpacked=4, window=window).check()


def test_empty_row_is_zero():
    case = Case([0, 40])
    assert (case.run()[0] == 0).all()
    case.check()


def test_nothing_packed_yet():
    Case([9, 4], sinks=2, unpacked=8, packed=False).check()


def test_workspace_is_optional():
    case = Case([50])
    args = (case.query, case.keys, case.values, case.lengths, case.scaling)
    out = transform_attention(*args, rope=case.rope, backend="triton")
    torch.testing.assert_close(out, case.run(), atol=1e-3, rtol=1e-3)


def test_shapes_that_do_not_fit_are_refused():
    case = Case([40])
    with pytest.raises(ValueError, match="lengths"):
        transform_attention(case.query, case.keys, case.values, case.lengths[:0], case.scaling)
    with pytest.raises(ValueError, match="query heads"):
        transform_attention(case.query[:, :, :24], case.keys, case.values, case.lengths, case.scaling)
    with pytest.raises(ValueError, match="sinks, room"):
        other = Case([40], sinks=3)
        transform_attention(case.query, case.keys, other.values, case.lengths, case.scaling)
