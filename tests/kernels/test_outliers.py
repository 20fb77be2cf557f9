"""Outliers in decode attention by the kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases import CHANNEL, HALF, TEMPORAL, Case, codebook, random_outliers, scalars
from kvq_kernels.tuning import trying
from tiers import slow

pytestmark = pytest.mark.gpu

POOLED = partial(random_outliers, capacity=70, pooled=True)


@pytest.mark.parametrize("bits", [2, *slow(3, 4)])
def test_scalar_codebooks(bits):
    lists = (random_outliers, POOLED)
    Case(*scalars(bits, 128), [150], dim=128, rope=("half", 128), offset=3, outliers=lists, sinks=1).check()


@pytest.mark.parametrize("sides", [TEMPORAL, *slow(CHANNEL)], ids=["temporal", "channel"])
def test_vector_codebooks(sides):
    lists = (random_outliers, partial(random_outliers, capacity=7))
    Case(*sides, [300, 140], **HALF, outliers=lists, unpacked=(8, 8), sinks=8).check()


@pytest.mark.parametrize("rope", [("half", 32), *slow(("half", 64), ("interleaved", 32), ("interleaved", 64), None)])
def test_rotations(rope):
    Case(scalars(4)[0], codebook, [200], rope=rope, rope_scale=1.1, offset=3, outliers=(random_outliers, None)).check()


@pytest.mark.parametrize("sides", [scalars(2), *slow(TEMPORAL, CHANNEL)], ids=["scalars", "temporal", "channel"])
def test_pooled_over_heads(sides):
    Case(*sides, [170], heads=2, **HALF, outliers=(random_outliers, POOLED), unpacked=(8, 8), sinks=8).check()


@pytest.mark.parametrize("capacity", [16, *slow(33)])
def test_several_chunks(capacity):
    lists = (
        partial(random_outliers, capacity=2 * capacity),
        partial(random_outliers, capacity=16 * capacity, pooled=True),
    )
    Case(*scalars(2), [200], heads=2, **HALF, outliers=lists, unpacked=(8, 8)).check()


@pytest.mark.slow
@pytest.mark.parametrize("head", [0, *slow(1, 2)])
def test_all_in_one_head(head):

    def lists(g, shape, dtype):
        pooled = random_outliers(g, (shape[0], 1, *shape[2:]), dtype, capacity=50)
        start = torch.tensor([0] * (head + 1) + [50] * (shape[1] - head), dtype=torch.int32)
        return replace(pooled, start=start.expand(*pooled.index.shape[:3], -1).contiguous())

    Case(*scalars(2), [170], heads=3, **HALF, outliers=(random_outliers, lists), unpacked=(8, 8)).check()


@pytest.mark.slow
@pytest.mark.parametrize("sides", [scalars(2), *slow(TEMPORAL)], ids=["scalars", "temporal"])
@pytest.mark.parametrize("queries", [8, *slow(16)])
def test_queries_are_padded(sides, queries):
    with trying("decode_attention", {"queries": queries}):
        for group in (1, 3, 16):
            Case(
                *sides, [140], heads=2, group=group, **HALF, outliers=(random_outliers, POOLED), unpacked=(8, 8)
            ).check()


@pytest.mark.parametrize("tokens", [16, *slow(32, 128)])
def test_tiles(tokens):
    lists = (partial(random_outliers, tokens=16), partial(random_outliers, tokens=16, capacity=60, pooled=True))
    with trying("decode_attention", {"tokens": tokens}):
        Case(*scalars(2), [150], **HALF, outliers=lists, unpacked=(8, 8)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_types(dtype):
    Case(*scalars(2), [150], dtype=dtype, **HALF, outliers=(random_outliers, POOLED), unpacked=(8, 8)).check()


@pytest.mark.parametrize("dim", [16, *slow(80, 256)])
def test_head_dims(dim):
    lists = (random_outliers, POOLED)
    Case(*scalars(2, dim), [150], dim=dim, rope=("half", dim), outliers=lists, unpacked=(8, 8), heads=2).check()
