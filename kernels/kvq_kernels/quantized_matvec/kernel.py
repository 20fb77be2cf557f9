"""q K^T and p V over uniform codes: a program reads a run of tiles of one kv head, for all of its query heads.

Tiles are read by the format's reader where it fits. One more program then reads the tail, the tokens that
fill no tile, element by element; without that path, all tiles are read so. `launch.py` passes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.addresses import at_head
from kvq_kernels.decode_attention.by_element import scores_of, tile_count

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
    keys,  # `SidePointers`
    strides,
    tokens,
    C: tl.constexpr,  # `TileLoop`
    ELEMENTS: tl.constexpr,  # the same, whose reader reads by element
    UNIFORM: tl.constexpr,  # whether C has another reader
    TAIL: tl.constexpr,  # 1: the last program reads the tail; 0: there is no tail
    STAGES: tl.constexpr,
):
    """S = Q K^T (Eq. 3)."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    head, row = tl.program_id(1), tl.program_id(2)
    k = at_head(keys, strides, S, row, head).packed
    first_query = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP
    q = query + first_query * S.dim
    member, line = tl.arange(0, M), tl.arange(0, N)
    pointers = out + (first_query + member)[:, None] * tokens
    mask = (member < GROUP)[:, None]
    first, last = _tile_range(tokens, N, UNIFORM, TAIL)
    if UNIFORM:
        if TAIL == 0 or tl.program_id(0) < tl.num_programs(0) - 1:
            queries = C.reader.queries(q, C)
            for tile in tl.range(first, last, num_stages=STAGES):
                qk = C.reader.scores(queries, (), k, tile, (), 0, C)
                tl.store(pointers + (tile * N + line)[None, :], qk[0].to(out.dtype.element_ty), mask=mask)
        else:
            _scores_by_element(q, pointers, k, tokens // N, tokens // N + 1, tokens, ELEMENTS, 1)
    else:
        _scores_by_element(q, pointers, k, first, last, tokens, ELEMENTS, STAGES)


@triton.jit
def _scores_by_element(q, pointers, k, first, last, tokens, C: tl.constexpr, STAGES: tl.constexpr):
    """Store scores of tiles [first, last), element by element; the last tile may be partial."""
    queries = C.reader.queries(q, C)
    mask = (tl.arange(0, C.M) < C.GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        index = tile * C.N + tl.arange(0, C.N)
        token = tl.minimum(index, tokens - 1)
        qk = scores_of(queries, k, token, token, (), 0, C)
        tl.store(pointers + index[None, :], qk.to(pointers.dtype.element_ty), mask=mask & (index < tokens)[None, :])


@triton.jit
def outputs_kernel(
    weights,  # [B, Q, T]
    partial,  # [programs of a head, B, Q, D]: sums over each program's tokens
    values,
    strides,
    tokens,
    C: tl.constexpr,
    ELEMENTS: tl.constexpr,
    UNIFORM: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O = P V (Eq. 5)."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    head, row = tl.program_id(1), tl.program_id(2)
    v = at_head(values, strides, S, row, head).packed
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
            acc = C.reader.init(C)
            for tile in tl.range(first, last, num_stages=STAGES):
                p = tl.load(pointers + (tile * N + line)[None, :], mask=mask, other=0.0).to(tl.float32) * P_FACTOR
                prefetched = C.reader.prefetch(v, tile, C)
                acc = C.reader.accumulate(acc, (p,), None, prefetched, (), v, tile, C)
            C.reader.store(acc, sums, lift, C)
        else:
            tail = tokens // N
            columns = _outputs_by_element(pointers, v, tail, tail + 1, tokens, ELEMENTS, 1)
            ELEMENTS.reader.store(columns, sums, lift, ELEMENTS)
    else:
        columns = _outputs_by_element(pointers, v, first, last, tokens, ELEMENTS, STAGES)
        ELEMENTS.reader.store(columns, sums, lift, ELEMENTS)


@triton.jit
def _outputs_by_element(pointers, v, first, last, tokens, C: tl.constexpr, STAGES: tl.constexpr):
    """p V of tiles [first, last) times P_FACTOR, by element: column tiles [M, E]; the last tile may be partial."""
    S: tl.constexpr = C.S
    E: tl.constexpr = C.E
    N: tl.constexpr = C.N
    T: tl.constexpr = C.T
    acc = C.reader.init(C)
    mask = (tl.arange(0, C.M) < C.GROUP)[:, None]
    for tile in tl.range(first, last, num_stages=STAGES):
        index = tile * N + tl.arange(0, N)
        p = (
            tl.load(pointers + index[None, :], mask=mask & (index < tokens)[None, :], other=0.0).to(tl.float32)
            * P_FACTOR
        )
        token = tl.minimum(index, tokens - 1)
        new = ()
        for j in tl.static_range(tile_count(C)):
            channel = (j * E + tl.arange(0, E))[None, :]
            x = S.element(v, S, token[:, None], channel, channel < S.dim)
            new = new + (tl.dot(p.to(T), x.to(T), acc[j], input_precision=C.PRECISION),)
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
