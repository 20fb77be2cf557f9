"""Tiles read element by element: of every format, wherever no faster reader of its own fits."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.format import KeyReader, TileLoop, ValueReader
from kvq_kernels.decode_attention.formats.shared import no_prefetch, nothing
from kvq_kernels.decode_attention.rope import load_cos_sin, pair_channels, position_cos_sin, unrotate
from kvq_kernels.decode_attention.subtiles import subtile_tokens
from kvq_kernels.decode_attention.tiles import column_tiles


@triton.constexpr_function
def tile_count(constants: TileLoop) -> int:
    """Accumulator tiles of values."""
    return column_tiles(constants.S, constants.E)


@triton.constexpr_function
def tile_steps(index: int, constants: TileLoop) -> tuple[int, ...]:
    """Distances in channels from row 0 of tile 0 to rows 0, 8, ... of tile `index`."""
    return tuple(range(index * constants.E, (index + 1) * constants.E, 8))


@triton.jit
def first_channel(thread, C: tl.constexpr):
    """Channel of row 0 of accumulator tile 0 in each of 8 threads."""
    return thread


@triton.jit
def queries(q, C: tl.constexpr):
    """Column tiles [M, E] of the queries in their type; with RoPE both halves of each tile of pairs, in float32."""
    STYLE: tl.constexpr = C.STYLE
    WIDTH: tl.constexpr = C.WIDTH
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    E: tl.constexpr = C.E
    D: tl.constexpr = C.S.dim
    P: tl.constexpr = column_tiles(C.S, E)
    column, member = tl.arange(0, E)[None, :], tl.arange(0, M)[:, None]
    planes = ()
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = j * E + column
            mask = (member < GROUP) & (channel < D)
            planes = planes + (tl.load(q + member * D + channel, mask=mask, other=0.0),)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            mask = (member < GROUP) & (pair < D // 2)
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            planes = planes + (
                tl.load(q + member * D + c1, mask=mask, other=0.0).to(tl.float32),
                tl.load(q + member * D + c2, mask=mask, other=0.0).to(tl.float32),
            )
    return planes


@triton.jit
def unrotate_query(q1, q2, rope, position, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """R(-position) of queries, times the rotation's scale, which keys would otherwise be multiplied by."""
    cos, sin = position_cos_sin(rope, position + tl.zeros([1], tl.int32), pair, WIDTH, D)
    return unrotate(q1, q2, cos, sin)


@triton.jit
def scores(queries, table, k, tile, rope, start, C: tl.constexpr):
    """See `KeyReader`."""
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    begin = tile * C.N
    qk = ()
    for i in tl.static_range(L):
        within = subtile_tokens(tl.arange(0, R), i, R, BLOCK)
        qk = qk + (scores_of(queries, k, begin + within, within, rope, start + begin, C),)
    return qk


@triton.jit
def scores_of(queries, k, token, within, rope, position, C: tl.constexpr):
    """q . k, float32 [M, R], of packed tokens `token` [R], which are `within` a tile whose first is at `position`.

    A key is R(position) R(within) x: the first rotation is undone on the query, the second applied to x.
    """
    S: tl.constexpr = C.S
    STYLE: tl.constexpr = C.STYLE
    WIDTH: tl.constexpr = C.WIDTH
    M: tl.constexpr = C.M
    R: tl.constexpr = C.R
    E: tl.constexpr = C.E
    T: tl.constexpr = C.T
    PRECISION: tl.constexpr = C.PRECISION
    D: tl.constexpr = S.dim
    P: tl.constexpr = column_tiles(S, E)
    column = tl.arange(0, E)
    row = token[:, None]
    qk = tl.zeros([M, R], tl.float32)
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = (j * E + column)[None, :]
            x = S.element(k, S, row, channel, channel < D)
            qk = tl.dot(queries[j].to(T), tl.trans(x.to(T)), qk, input_precision=PRECISION)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            mask = (pair < D // 2)[None, :]
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            x1 = S.element(k, S, row, c1[None, :], mask)
            x2 = S.element(k, S, row, c2[None, :], mask)
            cos, sin = load_cos_sin(rope[1], within[:, None], pair[None, :], WIDTH, D)
            a1, a2 = unrotate_query(queries[2 * j], queries[2 * j + 1], rope, position, pair, WIDTH, D)
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            qk = tl.dot(a1.to(T), tl.trans(x1.to(T)), qk, input_precision=PRECISION)
            qk = tl.dot(a2.to(T), tl.trans(x2.to(T)), qk, input_precision=PRECISION)
    return qk


@triton.jit
def init(C: tl.constexpr):
    """Empty accumulator: column tiles [M, E]."""
    M: tl.constexpr = C.M
    E: tl.constexpr = C.E
    acc = ()
    for _ in tl.static_range(tile_count(C)):
        acc = acc + (tl.zeros([M, E], tl.float32),)
    return acc


@triton.jit
def accumulate(acc, p, alpha, prefetched, table, v, tile, C: tl.constexpr):
    """See `ValueReader`: column tiles [M, E]."""
    S: tl.constexpr = C.S
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    E: tl.constexpr = C.E
    T: tl.constexpr = C.T
    begin = tile * C.N
    new = ()
    for j in tl.static_range(tile_count(C)):
        channel = (j * E + tl.arange(0, E))[None, :]
        a = acc[j] * alpha[:, None]
        for i in tl.static_range(L):
            token = begin + subtile_tokens(tl.arange(0, R), i, R, BLOCK)
            x = S.element(v, S, token[:, None], channel, channel < S.dim)
            a = tl.dot(p[i].to(T), x.to(T), a, input_precision=C.PRECISION)
        new = new + (a,)
    return new


@triton.jit
def store(acc, out, l_i, C: tl.constexpr):
    """See `ValueReader`."""
    E: tl.constexpr = C.E
    member = tl.arange(0, C.M)[:, None]
    for j in tl.static_range(tile_count(C)):
        channel = (j * E + tl.arange(0, E))[None, :]
        mask = (member < C.GROUP) & (channel < C.S.dim)
        tl.store(out[:, None] + channel, acc[j] / l_i[:, None], mask=mask)


KEYS = KeyReader("by_element.keys", subtiles=False, table=nothing, queries=queries, scores=scores)
VALUES = ValueReader(
    "by_element.values",
    subtiles=False,
    table=nothing,
    init=init,
    prefetch=no_prefetch,
    accumulate=accumulate,
    store=store,
    tiles=tile_count,
    steps=tile_steps,
    channel=first_channel,
    transposed=True,
)
