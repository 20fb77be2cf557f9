"""Codebook entries fetched whole: one load of 4, 8 or 16 bytes per code brings all its numbers.

A tile is L tiles of R tokens, tokens i, L + i, 2 L + i, ... in the i-th: then the tokens of a code of l <= L tokens lie
in the same place of l tiles. With RoPE the key in line n of tile i is R(start) R(i) R(n L) x: the first two turns are
taken back from the query, so that one table of R rows turns the keys of all L tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.rope import position_turn, turn
from kvq_kernels.decode_attention.spec import get


@triton.constexpr_function
def gathers(spec, style, width, columns, keys):
    """Whether a side can be read so: 256 entries of 2, 4 or 8 float16 numbers, whole pieces of `columns` codes, turned
    pairs in different ones."""
    size = spec.tokens * spec.channels
    fits = spec.kind == "codebook" and spec.bits == 8 and spec.half and not spec.token_scaled
    fits = fits and size in (2, 4, 8) and spec.share % spec.channels == 0
    fits = fits and spec.dim % (2 * columns * spec.channels) == 0
    return fits and (not keys or style == "none" or (style == "half" and width // 2 % spec.channels == 0))


@triton.constexpr_function
def turned_columns(spec, width):
    """Columns of codes between a turned pair's two."""
    return width // 2 // spec.channels


@triton.constexpr_function
def column_planes(spec, columns):
    return spec.dim // spec.channels // columns


@triton.jit
def entries(side, S: tl.constexpr, line, column):
    """The entries of the codes in rows `line` [n], columns `column` [E], as integers: (numbers 0 ... 3, numbers 4 ...
    7), int32 of two numbers, int64 of four; the second is the first where there are no more than four."""
    C: tl.constexpr = get(S, "channels")
    SIZE: tl.constexpr = get(S, "tokens") * C
    code = tl.load(side[0] + line[:, None] * (get(S, "dim") // C) + column[None, :])
    # Unsigned: the address is then one register beside a base that all threads share.
    place = (column * C // get(S, "share") * 256)[None, :].to(tl.uint32) + code.to(tl.uint32)
    if SIZE == 2:
        found = tl.load(side[1].to(tl.pointer_type(tl.int32), bitcast=True) + place)
        return found, found
    elif SIZE == 4:
        found = tl.load(side[1].to(tl.pointer_type(tl.int64), bitcast=True) + place)
        return found, found
    else:
        table = side[1].to(tl.pointer_type(tl.int64), bitcast=True) + place * 2
        return tl.load(table), tl.load(table + 1)


@triton.jit
def entry_number(low, high, r: tl.constexpr):
    """Number r of entries, float16."""
    word = low if r < 4 else high
    return (word >> (16 * (r % 4))).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def exchanged(tiles, i: tl.constexpr, tile):
    """The tuple `tiles` with `tile` as its i-th."""
    return tiles[:i] + (tile,) + tiles[i + 1 :]


@triton.jit
def normalized(x, side, S: tl.constexpr, channel):
    """x std + mean, where the side has them."""
    if get(S, "scaled"):
        return x * tl.load(side[3] + channel).to(x.dtype)[None, :] + tl.load(side[2] + channel).to(x.dtype)[None, :]
    else:
        return x


@triton.jit
def gather_queries(
    q, S: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr
):
    """[M, E] for each plane of columns and each channel of a code; with RoPE the two of a pair follow each other."""
    D: tl.constexpr = get(S, "dim")
    C: tl.constexpr = get(S, "channels")
    member = tl.arange(0, M)[:, None]
    mine = (member < GROUP) & (tl.arange(0, E)[None, :] >= 0)
    queries = ()
    if STYLE == "none":
        for j in tl.static_range(column_planes(S, E)):
            for c in tl.static_range(C):
                channel = (j * E + tl.arange(0, E)) * C + c
                queries = queries + (tl.load(q + member * D + channel[None, :], mask=mine, other=0.0),)
    else:
        for j in tl.static_range(column_planes(S, E) // 2):
            first, second = pair_columns(j, S, WIDTH, E)
            for c in tl.static_range(C):
                q1 = tl.load(q + member * D + (first * C + c)[None, :], mask=mine, other=0.0)
                q2 = tl.load(q + member * D + (second * C + c)[None, :], mask=mine, other=0.0)
                queries = queries + (q1.to(tl.float32), q2.to(tl.float32))
    return queries


@triton.jit
def pair_columns(j: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr):
    """The two columns of codes of each of E pairs; those that are not turned are paired as they are left."""
    HALF: tl.constexpr = turned_columns(S, WIDTH)
    COLUMNS: tl.constexpr = get(S, "dim") // get(S, "channels")
    pair = j * E + tl.arange(0, E)
    if HALF * 2 == COLUMNS:
        return pair, pair + HALF
    else:
        turned = pair < HALF
        return tl.where(turned, pair, pair + HALF), tl.where(turned, pair + HALF, pair + COLUMNS // 2)


@triton.jit
def gather_scores(
    queries, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k of the tile that starts at packed token `begin`: L times float32 [M, R]."""
    D: tl.constexpr = get(S, "dim")
    C: tl.constexpr = get(S, "channels")
    TOKENS: tl.constexpr = get(S, "tokens")
    line = tl.arange(0, R)
    scores = ()
    for _ in tl.static_range(L):
        scores = scores + (tl.zeros([R, M], tl.float32),)
    if STYLE == "none":
        for j in tl.static_range(column_planes(S, E)):
            column = j * E + tl.arange(0, E)
            for h in tl.static_range(L // TOKENS):
                low, high = entries(k, S, begin // TOKENS + line * (L // TOKENS) + h, column)
                for r in tl.static_range(TOKENS * C):
                    x = normalized(entry_number(low, high, r).to(T), k, S, column * C + r % C)
                    s = scores[h * TOKENS + r // C]
                    s = tl.dot(x, tl.trans(queries[j * C + r % C].to(T)), s, input_precision=PRECISION)
                    scores = exchanged(scores, h * TOKENS + r // C, s)
    else:
        for j in tl.static_range(column_planes(S, E) // 2):
            tl.debug_barrier()  # what belongs to a plane is loaded when it is needed: no registers for all of them
            first, second = pair_columns(j, S, WIDTH, E)
            turned = ()
            for c in tl.static_range(C):
                pair = (j * E + tl.arange(0, E)) * C + c
                cos, sin = position_turn(rope, start + begin + tl.zeros([1], tl.int32), pair, WIDTH, D)
                q1, q2 = queries[2 * (j * C + c)], queries[2 * (j * C + c) + 1]
                turned = turned + (q1 * cos + q2 * sin, q2 * cos - q1 * sin)
            for h in tl.static_range(L // TOKENS):
                row = begin // TOKENS + line * (L // TOKENS) + h
                low1, high1 = entries(k, S, row, first)
                low2, high2 = entries(k, S, row, second)
                for r in tl.static_range(TOKENS * C):
                    pair = (j * E + tl.arange(0, E)) * C + r % C
                    x1 = normalized(entry_number(low1, high1, r).to(T), k, S, first * C + r % C)
                    x2 = normalized(entry_number(low2, high2, r).to(T), k, S, second * C + r % C)
                    cos, sin = turn(rope[1 if tl.float32 == T else 2], line[:, None] * L, pair[None, :], WIDTH, D)
                    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
                    q1, q2 = turned[2 * (r % C)], turned[2 * (r % C) + 1]
                    cos, sin = turn(rope[1], h * TOKENS + r // C, pair[None, :], WIDTH, D)
                    a1, a2 = q1 * cos + q2 * sin, q2 * cos - q1 * sin
                    s = scores[h * TOKENS + r // C]
                    s = tl.dot(y1.to(T), tl.trans(a1.to(T)), s, input_precision=PRECISION)
                    s = tl.dot(y2.to(T), tl.trans(a2.to(T)), s, input_precision=PRECISION)
                    scores = exchanged(scores, h * TOKENS + r // C, s)
    found = ()
    for i in tl.static_range(L):
        found = found + (tl.trans(scores[i]),)
    return found


@triton.jit
def gather_nothing(S: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """`acc` of no tokens."""
    acc = ()
    for _ in tl.static_range(column_planes(S, E) * get(S, "channels")):
        acc = acc + (tl.zeros([E, M], tl.float32),)
    return acc


@triton.jit
def gather_values(
    acc, weights, shrink, v, S: tl.constexpr, begin, L: tl.constexpr, R: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc shrink + weights V, [E, M] for each plane of columns and each channel of a code."""
    C: tl.constexpr = get(S, "channels")
    TOKENS: tl.constexpr = get(S, "tokens")
    line = tl.arange(0, R)
    new = ()
    for j in tl.static_range(column_planes(S, E)):
        tl.debug_barrier()
        column = j * E + tl.arange(0, E)
        parts = ()
        for c in tl.static_range(C):
            parts = parts + (acc[j * C + c] * shrink[None, :],)
        for h in tl.static_range(L // TOKENS):
            low, high = entries(v, S, begin // TOKENS + line * (L // TOKENS) + h, column)
            for r in tl.static_range(TOKENS * C):
                x = normalized(entry_number(low, high, r).to(T), v, S, column * C + r % C)
                w = tl.trans(weights[h * TOKENS + r // C].to(T))
                parts = exchanged(parts, r % C, tl.dot(tl.trans(x), w, parts[r % C], input_precision=PRECISION))
        new = new + parts
    return new


@triton.jit
def gather_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    C: tl.constexpr = get(S, "channels")
    mine = (tl.arange(0, M)[None, :] < GROUP) & (tl.arange(0, E)[:, None] >= 0)
    for j in tl.static_range(column_planes(S, E)):
        for c in tl.static_range(C):
            channel = (j * E + tl.arange(0, E)) * C + c
            tl.store(out[None, :] + channel[:, None], acc[j * C + c] / total[None, :], mask=mine)
