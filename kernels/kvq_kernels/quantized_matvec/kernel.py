"""q K^T and p V over uniform codes: a program reads a run of tiles of one kv head, for all of its query heads.

Tiles are read by `decode_attention`'s uniform path where it fits. One more program then reads the tail, the tokens that
fill no tile, element by element; without that path, all tiles are read so. `launch.py` passes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import at_head, dequantize
from kvq_kernels.decode_attention.main_loop import generic_init, generic_queries, generic_scores, generic_store
from kvq_kernels.decode_attention.spec import column_tiles
from kvq_kernels.decode_attention.uniform_keys import uniform_queries, uniform_scores
from kvq_kernels.decode_attention.uniform_values import (
    uniform_accumulate,
    uniform_init,
    uniform_prefetch,
    uniform_store,
)

#: Factor on P before it is rounded to float16, which loses bits below 2^-14.
P_FACTOR = tl.constexpr(256.0)


@triton.jit
def _tile_range(tokens, N: tl.constexpr, UNIFORM: tl.constexpr, TAIL: tl.constexpr):
    """(first, last): this program reads tiles [first, last); with UNIFORM, of whole tiles alone."""
    tiles = tokens // N if UNIFORM else tl.cdiv(tokens, N)
    tiles_each = tl.cdiv(tiles, tl.num_programs(0) - TAIL)
    first = tl.minimum(tl.program_id(0) * tiles_each, tiles)
    return first, tl.minimum(first + tiles_each, tiles)


@triton.jit
def scores_kernel(
    query,  # [B, Q, D]
    out,  # [B, Q, T]
    keys,  # tuple of pointers, see `decode_attention/dequantize.py`
    strides,
    tokens,
    S: tl.constexpr,  # SideSpec
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two and to what a product takes
    N: tl.constexpr,  # tokens of a tile
    E: tl.constexpr,  # channels of a column tile, where the uniform path does not fit
    UNIFORM: tl.constexpr,  # tiles are read by `decode_attention/uniform.py`
    TAIL: tl.constexpr,  # 1: the last program reads the tail; 0: there is no tail
    T: tl.constexpr,  # type that numbers are multiplied in
    PRECISION: tl.constexpr,  # of float32 products
    STAGES: tl.constexpr,
):
    """S = Q K^T (Eq. 3)."""
    head, row = tl.program_id(1), tl.program_id(2)
    k = at_head(keys, strides, S, row, head)
    first_query = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP
    q = query + first_query * S.dim
    member, line = tl.arange(0, M), tl.arange(0, N)
    pointers = out + (first_query + member)[:, None] * tokens
    mask = (member < GROUP)[:, None]
    first, last = _tile_range(tokens, N, UNIFORM, TAIL)
    if UNIFORM:
        if TAIL == 0 or tl.program_id(0) < tl.num_programs(0) - 1:
            queries = uniform_queries(q, S, GROUP, M, T)
            for tile in tl.range(first, last, num_stages=STAGES):
                qk = uniform_scores(queries, k, S, tile, M, N, T, PRECISION)
                tl.store(pointers + (tile * N + line)[None, :], qk.to(out.dtype.element_ty), mask=mask)
        else:
            _generic_scores(q, pointers, k, tokens // N, tokens // N + 1, tokens, S, GROUP, M, N, E, T, PRECISION, 1)
    else:
        _generic_scores(q, pointers, k, first, last, tokens, S, GROUP, M, N, E, T, PRECISION, STAGES)


@triton.jit
def _generic_scores(
    q, pointers, k, first, last, tokens, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store scores of tiles [first, last), element by element; the last tile may be partial."""
    queries = generic_queries(q, S, "none", 0, GROUP, M, E)
    mask = (tl.arange(0, M) < GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        index = tile * N + tl.arange(0, N)
        token = tl.minimum(index, tokens - 1)
        qk = generic_scores(queries, k, S, 0, token, token, (), 0, "none", 0, M, N, E, T, PRECISION)
        tl.store(pointers + index[None, :], qk.to(pointers.dtype.element_ty), mask=mask & (index < tokens)[None, :])


@triton.jit
def outputs_kernel(
    weights,  # [B, Q, T]
    partial,  # [programs of a head, B, Q, D]: sums over each program's tokens
    values,
    strides,
    tokens,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    UNIFORM: tl.constexpr,
    TAIL: tl.constexpr,
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
    pointers = weights + (first_query + member)[:, None] * tokens
    mask = (member < GROUP)[:, None]
    first_partial = tl.program_id(0).to(tl.int64) * tl.num_programs(2) * queries
    sums = partial + (first_partial + first_query + member) * S.dim
    lift = tl.full([M], P_FACTOR, tl.float32)
    first, last = _tile_range(tokens, N, UNIFORM, TAIL)
    if UNIFORM:
        if TAIL == 0 or tl.program_id(0) < tl.num_programs(0) - 1:
            acc = uniform_init(S, M)
            for tile in tl.range(first, last, num_stages=STAGES):
                p = tl.load(pointers + (tile * N + line)[None, :], mask=mask, other=0.0).to(tl.float32) * P_FACTOR
                prefetched = uniform_prefetch(v, S, tile * N, M, N)
                acc = uniform_accumulate(acc, p, None, prefetched, v, S, tile, M, N, T, PRECISION)
            uniform_store(acc, sums, lift, S, GROUP, M)
        else:
            tail = tokens // N
            columns = _generic_outputs(pointers, v, tail, tail + 1, tokens, S, GROUP, M, N, E, T, PRECISION, 1)
            generic_store(columns, sums, lift, S, GROUP, M, E)
    else:
        columns = _generic_outputs(pointers, v, first, last, tokens, S, GROUP, M, N, E, T, PRECISION, STAGES)
        generic_store(columns, sums, lift, S, GROUP, M, E)


@triton.jit
def _generic_outputs(
    pointers, v, first, last, tokens, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p V of tiles [first, last) times P_FACTOR, by element: column tiles [M, E]; the last tile may be partial."""
    acc = generic_init(S, M, E)
    mask = (tl.arange(0, M) < GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        index = tile * N + tl.arange(0, N)
        p = (
            tl.load(pointers + index[None, :], mask=mask & (index < tokens)[None, :], other=0.0).to(tl.float32)
            * P_FACTOR
        )
        token = tl.minimum(index, tokens - 1)
        new = ()
        for j in tl.static_range(column_tiles(S, E)):
            channel = (j * E + tl.arange(0, E))[None, :]
            x = dequantize(v, S, token[:, None], channel, channel < S.dim)
            new = new + (tl.dot(p.to(T), x.to(T), acc[j], input_precision=PRECISION),)
        acc = new
    return acc


@triton.jit
def sum_kernel(partial, out, partials, count, N: tl.constexpr):
    """out [count] = sum over the first axis of partial [partials, count]."""
    element = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for _ in tl.range(0, partials):
        total += tl.load(partial + element, mask=element < count, other=0.0)
        partial += count
    tl.store(out + element, total.to(out.dtype.element_ty), mask=element < count)
