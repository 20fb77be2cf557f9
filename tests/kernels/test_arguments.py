"""Layouts that the kernels take."""

from __future__ import annotations

import pytest
import torch
from kvq_kernels.decode_attention.arguments import head_strides


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 5, 4), (60, 20, 4, 1)),
        ((2, 3, 5, 4), (300, 100, 4, 1)),  # room for more tokens
        ((2, 3, 5, 1), (15, 5, 1, 40)),  # one number per token: its stride means nothing
        ((2, 3, 1, 4), (300, 100, 7, 1)),
    ],
)
def test_contiguous_tokens_are_taken(shape, strides):
    assert head_strides(torch.empty(1000).as_strided(shape, strides)) == strides[:2]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 5, 4), (60, 20, 1, 5)), ((2, 3, 5, 4), (300, 100, 8, 1)), ((2, 3, 5, 1), (15, 5, 2, 1))],
)
def test_other_tokens_are_refused(shape, strides):
    with pytest.raises(ValueError, match="contiguous"):
        head_strides(torch.empty(1000).as_strided(shape, strides))
