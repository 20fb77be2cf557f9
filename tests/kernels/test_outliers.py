"""Outliers kept beside codes, by the kernels in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import CHANNEL, HALF, TEMPORAL, Case, codebook, scalars, sparse
from kvq_kernels.decode_attention import Outliers
from kvq_kernels.tuning import trying

OF_TOKENS = partial(sparse, tokens=1, slots=3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_of_codebooks_of_all_channels(bits):
    lists = (sparse, OF_TOKENS)
    Case(*scalars(bits, 128), [150], dim=128, rope=("half", 128), offset=3, outliers=lists, sinks=1).check()


@pytest.mark.parametrize("sides", [TEMPORAL, CHANNEL], ids=["temporal", "channel"])
def test_of_blocks(sides):
    lists = (sparse, partial(sparse, slots=7))
    Case(*sides, [300, 140], **HALF, outliers=lists, waiting=(8, 8), sinks=8).check()


@pytest.mark.parametrize("rope", [("half", 32), ("half", 64), ("interleaved", 32), ("interleaved", 64), None])
def test_of_turned_keys(rope):
    Case(scalars(4)[0], codebook, [200], rope=rope, rope_scale=1.1, offset=3, outliers=(sparse, None)).check()


@pytest.mark.parametrize("sides", [scalars(2), TEMPORAL, CHANNEL], ids=["scalars", "temporal", "channel"])
def test_of_tokens(sides):
    Case(*sides, [170], heads=2, **HALF, outliers=(sparse, OF_TOKENS), waiting=(8, 8), sinks=8).check()


@pytest.mark.parametrize("slots", [16, 33])
def test_more_than_a_piece(slots):
    """Of all heads' lists, more slots than one round of words has bits for."""
    lists = (partial(sparse, slots=2 * slots), partial(sparse, tokens=1, slots=slots))
    Case(*scalars(2), [200], heads=2, **HALF, outliers=lists, waiting=(8, 8)).check()


@pytest.mark.parametrize("head", [0, 1, 2])
def test_all_are_of_one_head(head):
    """Others then have none."""

    def lists(g, shape, dtype):
        found = sparse(g, (*shape[:1], 1, *shape[2:]), dtype, tokens=1, slots=5)
        return Outliers(found.index + head * shape[3], found.value, 1)

    Case(*scalars(2), [170], heads=3, **HALF, outliers=(sparse, lists), waiting=(8, 8)).check()


@pytest.mark.parametrize("sides", [scalars(2), TEMPORAL], ids=["scalars", "temporal"])
@pytest.mark.parametrize("queries", [8, 16])
def test_more_queries(sides, queries):
    with trying("decode_attention", {"queries": queries}):
        for group in (1, 3, 16):
            Case(*sides, [140], heads=2, group=group, **HALF, outliers=(sparse, OF_TOKENS), waiting=(8, 8)).check()


@pytest.mark.parametrize("tokens", [16, 32, 128])
def test_tiles(tokens):
    """Of 16 tokens by 5 slots, which are no whole number of words."""
    lists = (partial(sparse, tokens=16), partial(sparse, tokens=1, slots=5))
    with trying("decode_attention", {"tokens": tokens}):
        Case(*scalars(2), [150], **HALF, outliers=lists, waiting=(8, 8)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types(dtype):
    Case(*scalars(2), [150], dtype=dtype, **HALF, outliers=(sparse, OF_TOKENS), waiting=(8, 8)).check()


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_head_dims(dim):
    lists = (sparse, OF_TOKENS)
    Case(*scalars(2, dim), [150], dim=dim, rope=("half", dim), outliers=lists, waiting=(8, 8), heads=2).check()
