"""Attention to mixed tokens: packed on one side only, or in part of a tile. Read element by element; slow.

Any format is read so: `load_cached` finds a token wherever it is cached.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.addresses import at_tokens
from kvq_kernels.decode_attention.main_loop import split_output
from kvq_kernels.decode_attention.rope import pair_channels, position_cos_sin
from kvq_kernels.decode_attention.several_queries import finite_max, seen_tokens
from kvq_kernels.decode_attention.tiles import column_tiles


@triton.jit
def attend_mixed(
    q, partial, logsum, first_query, k, v, first, last, oldest, early, late, key_count, value_count,
    ring_size, rope, start, scale, K: tl.constexpr, SV: tl.constexpr, SINKS: tl.constexpr, N: tl.constexpr, sight,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Attend to mixed tokens [first, last) in float32: `early` tokens from `oldest` on, then all from `late` on.

    N: tokens of a tile. sight: of `seen_tokens`; None: one query, which sees all of these.
    """
    SK: tl.constexpr = K.S
    STYLE: tl.constexpr = K.STYLE
    WIDTH: tl.constexpr = K.WIDTH
    GROUP: tl.constexpr = K.GROUP
    M: tl.constexpr = K.M
    E: tl.constexpr = K.E
    PRECISION: tl.constexpr = K.PRECISION
    D: tl.constexpr = SK.dim
    P: tl.constexpr = column_tiles(SK, E)
    member, column, within = tl.arange(0, M), tl.arange(0, E), tl.arange(0, N)
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    tile = tl.arange(0, P)[:, None, None]
    acc = tl.zeros([P, M, E], tl.float32)
    if QUERIES > 1:
        seen_from, seen_end = seen_tokens(sight, M, QUERIES)
    for at in tl.range(first, last, N, num_stages=1):
        valid = at + within < last
        index = tl.minimum(at + within, last - 1)  # tables of cosines may end at the last token
        token = tl.where(index < early, oldest + index, index - early + late)
        tokens, mask_column = token[:, None], valid[:, None]
        qk = tl.zeros([M, N], tl.float32)
        if STYLE == "none":
            for j in tl.range(0, P, num_stages=1):
                channel = (j * E + column)[None, :]
                mask = (member[:, None] < GROUP) & (channel < D)
                a = tl.load(q + member[:, None] * D + channel, mask=mask, other=0.0).to(tl.float32)
                x = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, channel, mask_column & (channel < D))
                qk = tl.dot(a, tl.trans(x), qk, input_precision=PRECISION)
        else:
            for j in tl.range(0, P // 2, num_stages=1):
                pair = j * E + column
                c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
                mask = (pair < D // 2)[None, :]
                cos, sin = position_cos_sin(rope, start + token, pair, WIDTH, D)
                x1 = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, c1[None, :], mask_column & mask)
                x2 = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, c2[None, :], mask_column & mask)
                mask = (member[:, None] < GROUP) & mask
                a1 = tl.load(q + member[:, None] * D + c1[None, :], mask=mask, other=0.0).to(tl.float32)
                a2 = tl.load(q + member[:, None] * D + c2[None, :], mask=mask, other=0.0).to(tl.float32)
                qk = tl.dot(a1, tl.trans(x1 * cos - x2 * sin), qk, input_precision=PRECISION)
                qk = tl.dot(a2, tl.trans(x2 * cos + x1 * sin), qk, input_precision=PRECISION)
        qk = tl.where(valid[None, :], qk * scale, float("-inf"))
        if QUERIES > 1:
            seen = (token[None, :] >= seen_from[:, None]) & (token[None, :] < seen_end[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
        finite = finite_max(m_ij, QUERIES)
        p = tl.exp2(qk - finite[:, None])
        alpha = tl.exp2(m_i - finite)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc *= alpha[None, :, None]
        for j in tl.range(0, P, num_stages=1):
            channel = (j * E + column)[None, :]
            x = load_cached(v, SV, SINKS, ring_size[1], value_count, tokens, channel, mask_column & (channel < D))
            acc += tl.where(tile == j, tl.dot(p, x, input_precision=PRECISION)[None, :, :], 0.0)
        m_i = m_ij
    out = split_output(partial, first_query, D, M)
    if last > first:
        channel = tile * E + column[None, None, :]
        mask = (member[None, :, None] < GROUP) & (channel < D)
        tl.store(out[None, :, None] + channel, acc / l_i[None, :, None], mask=mask)
    tl.store(split_output(logsum, first_query, 1, M), m_i + tl.log2(l_i), mask=member < GROUP)


#: `attend_mixed` as a function that is called: a pass of the compiler is quadratic in the length of a function.
attend_mixed_noinline = triton.jit(attend_mixed.fn, noinline=True)


@triton.jit
def load_cached(side, S: tl.constexpr, SINKS: tl.constexpr, ring_size, count, token, channel, mask):
    """float32 [tokens, channels] of the row's tokens `token`, wherever they are cached: sinks, packed or ring."""
    D: tl.constexpr = S.dim
    index = token - SINKS
    packed = mask & (index >= 0) & (index < count)
    stored, within = at_tokens(side, S, index, (index >= 0) & (index < count))
    x = S.element(stored.packed, S, within, channel, packed)
    if S.outliers > 0:
        x = _with_outliers(x, stored.outliers, S, within, channel, packed)
    x = tl.where(packed, x, 0.0)
    exact = tl.zeros(x.shape, tl.float32)
    if SINKS > 0:
        exact += tl.load(side.windows.sinks + token * D + channel, mask=mask & (index < 0), other=0.0).to(tl.float32)
    if S.ring:
        recent = mask & (index >= 0) & (index >= count)
        exact += tl.load(side.windows.ring + (index % ring_size) * D + channel, mask=recent, other=0.0).to(tl.float32)
    if S.normed:
        exact /= tl.load(side.windows.norm + channel, mask=channel < D, other=1.0)
    return x + exact


@triton.jit
def _with_outliers(x, lists, S: tl.constexpr, token, channel, mask):
    """x with outliers put in: every slot of a block's list is compared with every element."""
    BLOCK: tl.constexpr = S.outlier_block
    CAPACITY: tl.constexpr = S.outliers
    block = token // BLOCK
    position = (token % BLOCK) * S.dim + channel
    first = block * CAPACITY
    slots, slot_mask = CAPACITY, mask
    if S.pooled_heads > 0:
        start = lists.start + block * (S.pooled_heads + 1)
        begin = tl.load(start, mask=mask, other=0)
        count = tl.load(start + 1, mask=mask, other=0) - begin
        first += begin
        slots = tl.max(tl.max(count, axis=1), axis=0)
    for slot in tl.range(0, slots, num_stages=1):
        if S.pooled_heads > 0:
            slot_mask = slot < count  # count is 0 where not `mask`
        index = tl.load(lists.index + first + slot, mask=slot_mask, other=-1).to(tl.int32)
        value = tl.load(lists.value + first + slot, mask=slot_mask, other=0.0).to(tl.float32)
        x = tl.where(index == position, value, x)
    return x
