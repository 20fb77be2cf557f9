"""Attention to exact tokens: sinks and recent tokens, which keys and values both hold as numbers.

Tokens, not the few queries of a kv head, are the rows of products: scores are [tokens, queries], outputs [channels,
queries]. Each number is loaded once. float32 factors, such as rotated keys and softmax weights, are multiplied as two
16-bit parts each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.addresses import at_tokens
from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.main_loop import LOG2_P_FACTOR, split_output
from kvq_kernels.decode_attention.rope import padded_dim, pair_channels, position_cos_sin
from kvq_kernels.decode_attention.several_queries import finite_max, seen_tokens
from kvq_kernels.decode_attention.tiles import exact_columns, exact_queries


@triton.jit
def attend_exact(
    q, partial, logsum, first_query, k, v, first, last, oldest, early, late, key_count, value_count, ring_size,
    rope, start, scale, SK: tl.constexpr, SV: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, SINKS: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, T: tl.constexpr, sight=None, QUERIES: tl.constexpr = 1,
):  # fmt: skip
    """Attend to exact tokens [first, last): `early` tokens from `oldest` on, then all from `late` on.

    N: tokens of a tile. PAIRS: of channels of a column tile with RoPE. T: type of products. PACKED: packed tokens are
    dense, and among these. sight: of `seen_tokens`; None: one query, which sees all of these.
    """
    D: tl.constexpr = SK.dim
    W: tl.constexpr = exact_queries(SK, M)
    E: tl.constexpr = exact_columns(SK, "none", PAIRS)
    within, column, member = tl.arange(0, N), tl.arange(0, E), tl.arange(0, W)
    queries = exact_query_columns(q, SK, STYLE, WIDTH, GROUP, W, PAIRS, T)
    m_i = tl.full([W], float("-inf"), tl.float32)
    l_i = tl.zeros([W], tl.float32)
    acc = ()
    for _ in tl.static_range(padded_dim(D) // E):
        acc = acc + (tl.zeros([E, W], tl.float32),)
    if QUERIES > 1:
        seen_from, seen_end = seen_tokens(sight, W, QUERIES)
    for at in tl.range(first, last, N, num_stages=1):
        index = tl.minimum(at + within, last - 1)  # repeated, and masked in the scores
        token = tl.where(index < early, oldest + index, index - early + late)
        places = exact_places(k, SK, STYLE, SINKS, ring_size[0], key_count, token, PACKED)
        qk = exact_scores(queries, places, k, SK, rope, start + token, STYLE, WIDTH, N, W, PAIRS, T)
        qk = tl.where((at + within < last)[:, None], qk * scale, float("-inf"))
        if QUERIES > 1:
            seen = (token[:, None] >= seen_from[None, :]) & (token[:, None] < seen_end[None, :])
            qk = tl.where(seen, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, axis=0))
        finite = finite_max(m_ij, QUERIES)
        p = tl.exp2(qk - (finite - LOG2_P_FACTOR)[None, :])
        alpha = tl.exp2(m_i - finite)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        high, low = _halves(p, T)
        places = exact_places(v, SV, "none", SINKS, ring_size[1], value_count, token, PACKED)
        new = ()
        for j in tl.static_range(padded_dim(D) // E):
            channel = (j * E + column)[None, :]
            x = _load(places, v, SV, channel, None if padded_dim(D) == D else channel < D)
            new = new + (_dot_with_halves(tl.trans(x), high, low, acc[j] * alpha[None, :], T),)
        acc = new
        m_i = m_ij
    out = split_output(partial, first_query, D, W)
    inside = (member < GROUP)[None, :]
    if last > first:
        for j in tl.static_range(padded_dim(D) // E):
            channel = (j * E + column)[:, None]
            tl.store(out[None, :] + channel, acc[j] / l_i[None, :], mask=inside & (channel < D))
    tl.store(split_output(logsum, first_query, 1, W), m_i + tl.log2(l_i) - LOG2_P_FACTOR, mask=member < GROUP)


@triton.jit
def exact_places(
    side, S: tl.constexpr, STYLE: tl.constexpr, SINKS: tl.constexpr, ring_size, count, token, PACKED: tl.constexpr
):
    """(pointers, mask, pointers, mask, ...), all [tokens, 1]: for each place where the side keeps exact tokens, where
    each would be, and whether it is there. With PACKED, dense packed tokens are one of these places.

    On NVIDIA's GPUs only (pointers,), selected by token: fewer instructions. Not where numbers are rotated, since
    Triton then sends what is loaded through shared memory to the layout of the cosines, nor for AMD's GPUs, whose
    compiler has no pointers into several tensors.
    """
    D: tl.constexpr = S.dim
    index = token - SINKS
    places = ()
    recent = index >= 0
    if S.ring:
        places = places + ((side.windows.ring + (index % ring_size) * D)[:, None], recent[:, None])
    if PACKED:
        packed = recent & (index < count)
        stored, within = at_tokens(side, S, index, packed)
        places = places + ((stored.packed.numbers + within * D)[:, None], packed[:, None])
    if SINKS > 0:
        places = places + ((side.windows.sinks + token * D)[:, None], (index < 0)[:, None])
    if S.nvidia and STYLE == "none":
        rows = places[0]
        for i in tl.static_range(2, len(places), 2):
            rows = tl.where(places[i + 1], places[i], rows)
        return (rows,)
    else:
        return places


@triton.jit
def _load(places, side, S: tl.constexpr, channel, mask):
    """Numbers [tokens, channels] at the `places` of tokens; divided by their norm, if they have one, in float32.

    mask: channels that exist; None: all.
    """
    if len(places) == 1:
        x = load(places[0], channel, mask, 0.0)
    else:
        x = load(places[0], channel, places[1] if mask is None else places[1] & mask, 0.0)
        for i in tl.static_range(2, len(places), 2):
            there = places[i + 1]
            x = tl.where(there, load(places[i], channel, there if mask is None else there & mask, 0.0), x)
    if S.normed:
        x = x.to(tl.float32) / load(side.windows.norm, channel, mask, 1.0)
    return x


@triton.jit
def exact_query_columns(
    q, S: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    PAIRS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Column tiles [channels, W] of the queries, in type T; with RoPE both halves of each tile of pairs."""
    D: tl.constexpr = S.dim
    E: tl.constexpr = exact_columns(S, STYLE, PAIRS)
    member, column = tl.arange(0, W)[None, :], tl.arange(0, E)[:, None]
    planes = ()
    if STYLE == "none":
        for j in tl.static_range(padded_dim(D) // E):
            channel = j * E + column
            mask = (member < GROUP) & (channel < D)
            planes = planes + (tl.load(q + member * D + channel, mask=mask, other=0.0).to(T),)
    else:
        for j in tl.static_range(padded_dim(D) // 2 // E):
            pair = j * E + column
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            mask = (member < GROUP) & (pair < D // 2)
            planes = planes + (
                tl.load(q + member * D + c1, mask=mask, other=0.0).to(T),
                tl.load(q + member * D + c2, mask=mask, other=0.0).to(T),
            )
    return planes


@triton.jit
def exact_scores(
    queries, places, k, S: tl.constexpr, rope, position, STYLE: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, PAIRS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """k . q, float32 [N, W], of the tokens at `places` and positions [N]."""
    D: tl.constexpr = S.dim
    E: tl.constexpr = exact_columns(S, STYLE, PAIRS)
    column = tl.arange(0, E)
    qk = tl.zeros([N, W], tl.float32)
    if STYLE == "none":
        for j in tl.static_range(padded_dim(D) // E):
            channel = (j * E + column)[None, :]
            x = _load(places, k, S, channel, None if padded_dim(D) == D else channel < D)
            qk = _dot_of_halves(x, queries[j], qk, T)
    else:
        for j in tl.static_range(padded_dim(D) // 2 // E):
            pair = j * E + column
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            mask = None if padded_dim(D) == D else (pair < D // 2)[None, :]
            cos, sin = position_cos_sin(rope, position, pair, WIDTH, D)
            x1 = _load(places, k, S, c1[None, :], mask).to(tl.float32)
            x2 = _load(places, k, S, c2[None, :], mask).to(tl.float32)
            qk = _dot_of_halves(x1 * cos - x2 * sin, queries[2 * j], qk, T)
            qk = _dot_of_halves(x2 * cos + x1 * sin, queries[2 * j + 1], qk, T)
    return qk


@triton.jit
def _halves(x, T: tl.constexpr):
    """(high, low) of type T, whose sum is float32 `x` to about twice T's bits."""
    high = x.to(T)
    return high, (x - high.to(tl.float32)).to(T)


@triton.jit
def _dot_of_halves(x, y, acc, T: tl.constexpr):
    """acc + x y; x of another type than T in two parts."""
    if x.dtype == T or T.is_fp32():
        return tl.dot(x.to(T), y, acc, input_precision="ieee")
    else:
        high, low = _halves(x.to(tl.float32), T)
        return tl.dot(low, y, tl.dot(high, y, acc))


@triton.jit
def _dot_with_halves(x, high, low, acc, T: tl.constexpr):
    """acc + x (high + low); x of another type than T in two parts."""
    if T.is_fp32():
        return tl.dot(x.to(T), high, acc, input_precision="ieee")
    elif x.dtype == T:
        return tl.dot(x, low, tl.dot(x, high, acc))
    else:
        rounded, rest = _halves(x.to(tl.float32), T)
        return tl.dot(rest, high, tl.dot(rounded, low, tl.dot(rounded, high, acc)))
