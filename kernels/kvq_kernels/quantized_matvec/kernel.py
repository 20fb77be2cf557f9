"""Both products over packed numbers; a program takes a run of tiles of one kv head, for all of its query heads.

Where tiles are read as `decode_attention` reads them, the tokens that fill no tile are one more program's, which reads
number by number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import at_head, number
from kvq_kernels.decode_attention.main_loop import load_queries, plain_nothing, plain_scores, plain_store
from kvq_kernels.decode_attention.spec import get, plane_count
from kvq_kernels.decode_attention.uniform_keys import fold_queries, fold_scores
from kvq_kernels.decode_attention.uniform_values import fold_load, fold_nothing, fold_store, fold_values

#: P is multiplied by this before it is rounded to float16, which has few digits below 2^-14.
LIFT = tl.constexpr(256.0)


@triton.jit
def _run(tokens, N: tl.constexpr, FOLD: tl.constexpr, REST: tl.constexpr):
    """Tiles [first, last) of this program: whole ones, if they are read so."""
    tiles = tokens // N if FOLD else tl.cdiv(tokens, N)
    each = tl.cdiv(tiles, tl.num_programs(0) - REST)
    first = tl.minimum(tl.program_id(0) * each, tiles)
    return first, tl.minimum(first + each, tiles)


@triton.jit
def scores_kernel(
    query,  # [B, Q, D]
    out,  # [B, Q, T]
    keys,  # tuple of pointers, see `dequantize.py`
    strides,
    tokens,
    S: tl.constexpr,  # SideSpec
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # that, as a power of two, and not less than a product takes
    N: tl.constexpr,  # tokens of a tile
    E: tl.constexpr,  # columns of a plane, where tiles are not folded
    FOLD: tl.constexpr,  # tiles are read as in `decode_attention.fold`
    REST: tl.constexpr,  # 1: there is a program for the tokens that fill no tile; 0: there is not
    T: tl.constexpr,  # type that numbers are multiplied in
    PRECISION: tl.constexpr,  # of float32 products
    STAGES: tl.constexpr,
):
    """S = Q K^T (Eq. 3)."""
    head, row = tl.program_id(1), tl.program_id(2)
    k = at_head(keys, strides, S, row, head)
    first_query = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP
    q = query + first_query * get(S, "dim")
    member, line = tl.arange(0, M), tl.arange(0, N)
    places = out + (first_query + member)[:, None] * tokens
    mine = (member < GROUP)[:, None]
    first, last = _run(tokens, N, FOLD, REST)
    if FOLD:
        if REST == 0 or tl.program_id(0) < tl.num_programs(0) - 1:
            queries = fold_queries(q, S, GROUP, M, T)
            for tile in tl.range(first, last, num_stages=STAGES):
                scores = fold_scores(queries, k, S, tile, M, N, T, PRECISION)
                tl.store(places + (tile * N + line)[None, :], scores.to(out.dtype.element_ty), mask=mine)
        else:
            _plain_scores(q, places, k, tokens // N, tokens // N + 1, tokens, S, GROUP, M, N, E, T, PRECISION, 1)
    else:
        _plain_scores(q, places, k, first, last, tokens, S, GROUP, M, N, E, T, PRECISION, STAGES)


@triton.jit
def _plain_scores(
    q, places, k, first, last, tokens, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last); tokens beyond the last are read as the last one and left out of what is stored."""
    queries = load_queries(q, S, "none", 0, GROUP, M, E)
    mine = (tl.arange(0, M) < GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        here = tile * N + tl.arange(0, N)
        token = tl.minimum(here, tokens - 1)
        scores = plain_scores(queries, k, S, 0, token, token, (), 0, "none", 0, M, N, E, T, PREC)
        tl.store(places + here[None, :], scores.to(places.dtype.element_ty), mask=mine & (here < tokens)[None, :])


@triton.jit
def outputs_kernel(
    weights,  # [B, Q, T]
    partial,  # [programs of a head, B, Q, D]: the sums of each run of tokens
    values,
    strides,
    tokens,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    FOLD: tl.constexpr,
    REST: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O = P V (Eq. 5)."""
    head, row = tl.program_id(1), tl.program_id(2)
    v = at_head(values, strides, S, row, head)
    queries = tl.num_programs(1) * GROUP
    first_query = row.to(tl.int64) * queries + head * GROUP
    member, line = tl.arange(0, M), tl.arange(0, N)
    places = weights + (first_query + member)[:, None] * tokens
    mine = (member < GROUP)[:, None]
    run = tl.program_id(0).to(tl.int64) * tl.num_programs(2) * queries
    sums = partial + (run + first_query + member) * get(S, "dim")
    total = tl.full([M], LIFT, tl.float32)
    first, last = _run(tokens, N, FOLD, REST)
    if FOLD:
        if REST == 0 or tl.program_id(0) < tl.num_programs(0) - 1:
            acc = fold_nothing(S, M)
            for tile in tl.range(first, last, num_stages=STAGES):
                p = tl.load(places + (tile * N + line)[None, :], mask=mine, other=0.0).to(tl.float32) * LIFT
                loaded = fold_load(v, S, tile * N, M, N)
                acc = fold_values(acc, p, None, loaded, v, S, tile, M, N, T, PRECISION)
            fold_store(acc, sums, total, S, GROUP, M)
        else:
            rest = tokens // N
            planes = _plain_outputs(places, v, rest, rest + 1, tokens, S, GROUP, M, N, E, T, PRECISION, 1)
            plain_store(planes, sums, total, S, GROUP, M, E)
    else:
        planes = _plain_outputs(places, v, first, last, tokens, S, GROUP, M, N, E, T, PRECISION, STAGES)
        plain_store(planes, sums, total, S, GROUP, M, E)


@triton.jit
def _plain_outputs(
    places, v, first, last, tokens, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of tiles [first, last) times LIFT, planes [M, E]; tokens beyond the last have no weight."""
    acc = plain_nothing(S, M, E)
    mine = (tl.arange(0, M) < GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        here = tile * N + tl.arange(0, N)
        p = tl.load(places + here[None, :], mask=mine & (here < tokens)[None, :], other=0.0).to(tl.float32) * LIFT
        token = tl.minimum(here, tokens - 1)
        new = ()
        for j in tl.static_range(plane_count(S, E)):
            channel = (j * E + tl.arange(0, E))[None, :]
            x = number(v, S, token[:, None], channel, channel < get(S, "dim"))
            new = new + (tl.dot(p.to(T), x.to(T), acc[j], input_precision=PREC),)
        acc = new
    return acc


@triton.jit
def sum_kernel(partial, out, runs, count, N: tl.constexpr):
    """out [count] = sum over the first dimension of partial [runs, count]."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for _ in tl.range(0, runs):
        total += tl.load(partial + at, mask=at < count, other=0.0)
        partial += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
