"""Decode attention of several queries per row against float64: each sees its own token and earlier ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import CHANNEL, HALF, TEMPORAL, Case, dense, per_head, random_outliers, scalars, uniform
from kvq_kernels.decode_attention import Tile, Workspace, decode_attention
from kvq_kernels.decode_attention.several_queries import query_blocks
from paged_cases import paged
from tiers import slow, slow_cases

pytestmark = pytest.mark.gpu

KIVI = (partial(uniform, axis="channel"), partial(uniform, axis="token"))
INNERQ = (partial(uniform, axis="token"), partial(uniform, axis="channel"))
WINDOWS = {"unpacked": (12, 20), "sinks": 4}


@pytest.mark.parametrize("queries", [1, 2, 3, *slow(5, 8), 16])
def test_uniform(queries):
    """Rows that are shorter than their queries have some that see no token."""
    case = Case(*KIVI, [150, 3, 40], heads=2, **WINDOWS).several(queries)
    case.check(3)
    out = case.run(1)
    for row, length in enumerate(case.lengths.tolist()):
        assert (out[row, :, : max(0, queries - length)] == 0).all()


@pytest.mark.parametrize("queries", [2, *slow(1, 3, 5, 8), 16])
@pytest.mark.parametrize("unpacked", [(0, 0), (40, 40)])
def test_dense(queries, unpacked):
    Case(dense, dense, [150, 9], unpacked=unpacked).several(queries).check(3)


@pytest.mark.parametrize("queries", [3, *slow(2, 5, 8, 16)])
@pytest.mark.parametrize("sides", [scalars(2), *slow(TEMPORAL, CHANNEL)], ids=["kvquant", "temporal", "channel"])
def test_codebooks_of_keys_before_rope(sides, queries):
    Case(*sides, [150, 30], **HALF, unpacked=(8, 8), sinks=8).several(queries).check(3)


@pytest.mark.parametrize(
    ("group", "queries"), [(4, 5), *slow_cases((1, 16), (3, 8), (4, 16), (8, 3), (8, 16), (20, 4))]
)
def test_query_heads(group, queries):
    """Some of these are more rows than a program has."""
    Case(*KIVI, [150], heads=2, group=group, **WINDOWS).several(queries).check(2)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "queries"), [(1, 16), (4, 5), (8, 8)])
def test_query_heads_of_codebooks(group, queries):
    Case(*scalars(2), [100], heads=2, group=group, **HALF, unpacked=(8, 8)).several(queries).check(2)


def test_blocks_of_query_rows():
    def blocks(group, queries, most=16):
        return query_blocks(group, queries, most)

    assert [blocks(4, queries) for queries in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    assert [blocks(32, queries) for queries in (1, 4, 16)] == [1, 4, 16]  # one query's rows are not divided
    assert blocks(3, 8) == 2 and blocks(1, 16) == 1


@pytest.mark.parametrize("window", [7, *slow(1, 50, 100, 1000)])
@pytest.mark.parametrize("sides", [KIVI, *slow((dense, dense))], ids=["kivi", "dense"])
def test_sliding_windows(sides, window):
    """Each query has its own first token, in a whole tile or not."""
    Case(*sides, [300, 50, 2], **WINDOWS, window=window).several(5).check(3)


def test_packed_tokens_that_only_later_queries_see():
    """All tokens are packed, the queries' own, too; whole tiles are those that all queries see."""
    for length in (128, 130):
        Case(*KIVI, [length]).several(16).check(3)
        Case(*KIVI, [length], sinks=4).several(16).check(3)


def test_no_token_beyond_a_query_is_seen():
    """Of 16 queries, query j gives what it gives as the only query of a row that ends at its token."""
    case = Case(*INNERQ, [200, 90], **WINDOWS, norm=True).several(16)
    together, query, lengths = case.run(2), case.query, case.lengths
    for number in (0, 6, 15):
        case.query, case.lengths = query[:, :, number].contiguous(), lengths - 15 + number
        torch.testing.assert_close(together[:, :, number], case.run(2), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
def test_types(dtype):
    Case(*KIVI, [150, 3], **WINDOWS, dtype=dtype).several(5).check(2)


def test_rotations():
    Case(*KIVI, [150, 40], rope=("interleaved", 32), rope_scale=1.1, offset=2, **WINDOWS).several(3).check(2)


@pytest.mark.slow
def test_outliers_and_storage_per_head():
    lists = (random_outliers, random_outliers)
    Case(*TEMPORAL, [140], **HALF, group=1, outliers=lists, unpacked=(8, 8)).several(3).check(2)
    keys = partial(per_head, makers=TEMPORAL[:1] + CHANNEL[:1], heads=((0, 2), (1,)))
    Case(keys, dense, [150], heads=3, group=4, **HALF).several(5).check(2)


@pytest.mark.parametrize("queries", [3, *slow(16)])
def test_pages(queries):
    """Bit for bit what they are from a row's one run of memory."""
    plain, pages = paged(Case(*KIVI, [150, 40], heads=2, **WINDOWS).several(queries), 32)
    plain.check(2)
    assert torch.equal(plain.run(2), pages.run(2))


@pytest.mark.slow
@pytest.mark.parametrize("sides", [scalars(2), TEMPORAL], ids=["kvquant", "temporal"])
def test_pages_of_codebooks(sides):
    """Their first packed token is not at the beginning of a tile."""
    case = Case(*sides, [140, 40], **HALF, unpacked=(8, 8), sinks=8).several(5)
    for stored in paged(case, 128, first=16):
        stored.check(2)


def test_rows_of_a_program_do_not_change_the_result():
    case = Case(*KIVI, [150], heads=2, group=4, **WINDOWS).several(8)
    args = {"scaling": case.scaling, "backend": "triton", "workspace": Workspace.like(case.query, 1)}
    inputs, tiles = (case.query, *case.sides, case.lengths), [Tile(tokens=32, rows=rows) for rows in (4, 8, 32)]
    outs = [decode_attention(*inputs, tile=tile, **args) for tile in tiles]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=2e-3, atol=2e-4)


def test_output_and_workspace():
    """Given ones have the query's shape; a workspace fits as many queries as the next power of two."""
    case = Case(*KIVI, [100]).several(3)
    args = (case.query, *case.sides, case.lengths, case.scaling)
    out, workspace = torch.empty_like(case.query), Workspace.like(case.query[:, :, [0] * 4], 2)
    returned = decode_attention(*args, backend="triton", out=out, workspace=workspace)
    assert returned is out and out.shape == case.query.shape
    torch.testing.assert_close(decode_attention(*args, backend="triton"), out, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(decode_attention(*args, backend="torch"), out, rtol=5e-3, atol=2e-3)
    with pytest.raises(ValueError, match="Workspace.like"):
        decode_attention(*args, workspace=Workspace.like(case.query[:, :, 0], 2))


@pytest.mark.parametrize("shape", [(1, 2, 17, 64), (1, 2, 0, 64), (1, 2, 1, 1, 64)])
def test_other_shapes_are_refused(shape):
    case = Case(*KIVI, [100])
    with pytest.raises(ValueError, match="1 to 16 queries"):
        decode_attention(torch.zeros(shape), *case.sides, case.lengths, case.scaling)
