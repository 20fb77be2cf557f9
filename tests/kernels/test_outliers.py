"""Outliers kept beside codes, by the kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases import CHANNEL, HALF, TEMPORAL, Case, codebook, scalars, sparse
from kvq_kernels.tuning import trying

pytestmark = pytest.mark.gpu

TOGETHER = partial(sparse, slots=70, together=True)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_of_codebooks_of_all_channels(bits):
    lists = (sparse, TOGETHER)
    Case(*scalars(bits, 128), [150], dim=128, rope=("half", 128), offset=3, outliers=lists, sinks=1).check()


@pytest.mark.parametrize("sides", [TEMPORAL, CHANNEL], ids=["temporal", "channel"])
def test_of_blocks(sides):
    lists = (sparse, partial(sparse, slots=7))
    Case(*sides, [300, 140], **HALF, outliers=lists, waiting=(8, 8), sinks=8).check()


@pytest.mark.parametrize("rope", [("half", 32), ("half", 64), ("interleaved", 32), ("interleaved", 64), None])
def test_of_turned_keys(rope):
    Case(scalars(4)[0], codebook, [200], rope=rope, rope_scale=1.1, offset=3, outliers=(sparse, None)).check()


@pytest.mark.parametrize("sides", [scalars(2), TEMPORAL, CHANNEL], ids=["scalars", "temporal", "channel"])
def test_together(sides):
    Case(*sides, [170], heads=2, **HALF, outliers=(sparse, TOGETHER), waiting=(8, 8), sinks=8).check()


@pytest.mark.parametrize("slots", [16, 33])
def test_more_than_a_piece(slots):
    lists = (partial(sparse, slots=2 * slots), partial(sparse, slots=16 * slots, together=True))
    Case(*scalars(2), [200], heads=2, **HALF, outliers=lists, waiting=(8, 8)).check()


@pytest.mark.parametrize("head", [0, 1, 2])
def test_all_are_of_one_head(head):
    """Others then have none."""

    def lists(g, shape, dtype):
        found = sparse(g, (shape[0], 1, *shape[2:]), dtype, slots=50)
        start = torch.tensor([0] * (head + 1) + [50] * (shape[1] - head), dtype=torch.int32)
        return replace(found, start=start.expand(*found.index.shape[:3], -1).contiguous())

    Case(*scalars(2), [170], heads=3, **HALF, outliers=(sparse, lists), waiting=(8, 8)).check()


@pytest.mark.parametrize("sides", [scalars(2), TEMPORAL], ids=["scalars", "temporal"])
@pytest.mark.parametrize("queries", [8, 16])
def test_more_queries(sides, queries):
    with trying("decode_attention", {"queries": queries}):
        for group in (1, 3, 16):
            Case(*sides, [140], heads=2, group=group, **HALF, outliers=(sparse, TOGETHER), waiting=(8, 8)).check()


@pytest.mark.parametrize("tokens", [16, 32, 128])
def test_tiles(tokens):
    lists = (partial(sparse, tokens=16), partial(sparse, tokens=16, slots=60, together=True))
    with trying("decode_attention", {"tokens": tokens}):
        Case(*scalars(2), [150], **HALF, outliers=lists, waiting=(8, 8)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types(dtype):
    Case(*scalars(2), [150], dtype=dtype, **HALF, outliers=(sparse, TOGETHER), waiting=(8, 8)).check()


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_head_dims(dim):
    lists = (sparse, TOGETHER)
    Case(*scalars(2, dim), [150], dim=dim, rope=("half", dim), outliers=lists, waiting=(8, 8), heads=2).check()
