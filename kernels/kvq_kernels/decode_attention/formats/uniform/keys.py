"""Scores q . k of uniform codes: tokens are the rows of the products, query heads the columns.

Shared arithmetic is in `planes.py`; `values.py` is the other side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codes import SUBNORMAL_SCALE
from kvq_kernels.decode_attention.formats.format import KeyReader
from kvq_kernels.decode_attention.formats.shared import nothing
from kvq_kernels.decode_attention.formats.uniform.planes import (
    field_codes,
    field_scale,
    field_shares,
    fields_per_plane,
    group_fields,
    half_fields,
    has_zero_term,
    load_words,
    pair_signs,
    pair_up,
    pairs_to_float,
    pairs_within_word,
    plane_bit,
    plane_count,
    plane_group,
    plane_position,
    scale_magnitudes,
    sign_words,
    word_runs,
    words_per_thread,
    zero_pointer,
    zero_points,
    zero_scale,
    zero_source,
)
from kvq_kernels.decode_attention.layout_hints import load, unstack_last


@triton.jit
def load_plane(pointer, S: tl.constexpr, plane: tl.constexpr, M: tl.constexpr, stride, count):
    """[4 / V, M, 4, V] at the channels of a plane, from pointer + m stride for m below `count` (None: all); else 0."""
    V: tl.constexpr = words_per_thread(S, True)
    W: tl.constexpr = S.words
    POSITION: tl.constexpr = plane_position(S, True, plane)
    thread = tl.arange(0, 4)[None, None, :, None]
    if V == 1:
        thread = tl.max_contiguous(thread, [1, 1, 1, 1])
    word = thread * V + tl.arange(0, V)
    member = tl.arange(0, M)[None, :, None, None]
    static = tl.arange(0, 4 // V)[:, None, None, None]
    SHARE: tl.constexpr = group_fields(S) // field_shares(S, True)
    field = static // 2 + static % 2 * SHARE if V == 1 else static * SHARE if pairs_within_word(S, True) else static
    # Constants are added last, to become part of the instructions.
    first = (POSITION[2] + half_fields(S) * POSITION[1]) * W + POSITION[0] * 4 * V
    if word_runs(S, True) * 4 * V > W:
        mask = word < W - POSITION[0] * 4 * V
        mask = mask if count is None else mask & (member < count)
    else:
        mask = None if count is None else (word >= 0) & (member < count)
    return load(pointer + (member * stride + word), field * W + first, mask)


@triton.jit
def as_rows(x):
    """[4 / V, 8, 4, V] as left operand [16, 16]: threads, then registers of each; every row twice."""
    x = tl.reshape(tl.permute(x, (1, 2, 0, 3)), [8, 16])
    return tl.reshape(tl.permute(tl.join(x, x), (2, 0, 1)), [16, 16])


@triton.jit
def as_columns(x, S: tl.constexpr, M: tl.constexpr):
    """[4 / V, M, 4, V] as right operand [16, M]."""
    if pairs_within_word(S, True) and words_per_thread(S, True) == 2:
        return tl.reshape(tl.permute(x, (2, 3, 0, 1)), [16, M])
    else:
        return tl.reshape(tl.permute(x, (2, 0, 3, 1)), [16, M])


@triton.jit
def queries(q, C: tl.constexpr):
    """(planes, unscaled) of the queries. With scales per channel: planes [4 / V, M, 4, V] times `field_scale`, and
    without. With scales per token: planes as right operands, and the queries' sums over each group (`group_sums`)."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    T: tl.constexpr = C.T
    D: tl.constexpr = S.dim
    planes, unscaled = (), ()
    for i in tl.static_range(plane_count(S, True)):
        x = load_plane(q, S, i, M, D, GROUP).to(tl.float32)
        unit = plane_scales(S, i)
        if S.axis == "token":
            planes = planes + (as_columns((x * unit).to(T), S, M),)
        else:
            planes = planes + ((x * unit).to(T),)
            unscaled = unscaled + (x.to(T),)
    if S.axis == "token":
        unscaled = group_sums(q, S, GROUP, M, T)
    return planes, unscaled


@triton.jit
def plane_scales(S: tl.constexpr, plane: tl.constexpr):
    """`field_scale` of the numbers of a plane, [4 / V, 1, 1, 1]."""
    V: tl.constexpr = words_per_thread(S, True)
    POSITION: tl.constexpr = plane_position(S, True, plane)
    NEXT: tl.constexpr = POSITION[2] + fields_per_plane(S, True) - 1
    register = tl.arange(0, 4 // V)[:, None, None, None]
    later = register // 2 if V == 1 else register
    return tl.where(later == 0, field_scale(S, POSITION[2]), field_scale(S, NEXT))


@triton.jit
def group_sums(q, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, T: tl.constexpr):
    """[16, M]: sums of the queries over each group of channels, times `zero_scale`, rounded to T; below each, the
    rounding's residual."""
    D: tl.constexpr = S.dim
    G: tl.constexpr = S.group
    member, within = tl.arange(0, M)[:, None], tl.arange(0, triton.next_power_of_2(G))[None, :]
    row = tl.arange(0, 16)[:, None]
    group, residual = row // 2, row % 2 == 1
    sums = tl.zeros([16, M], tl.float32)
    for g in tl.static_range(D // G):
        x = tl.load(q + member * D + g * G + within, mask=(member < GROUP) & (within < G), other=0.0)
        sums = tl.where(group == g, tl.sum(x.to(tl.float32), axis=1)[None, :], sums)
    sums *= zero_scale(S)
    rounded = sums.to(T)
    return tl.where(residual, (sums - rounded.to(tl.float32)).to(T), rounded)


@triton.jit
def scores(queries, table, k, tile, rope, start, C: tl.constexpr):
    """See `KeyReader`. queries: of the function `queries`."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    T: tl.constexpr = C.T
    PRECISION: tl.constexpr = C.PRECISION
    V: tl.constexpr = words_per_thread(S, True)
    static, line = tl.arange(0, N // 8)[:, None, None, None] * 8, tl.arange(0, 8)[None, :, None, None]
    thread = tl.arange(0, 4)[None, None, :, None] * V + tl.arange(0, V)
    pairs, thirds = (), ()
    for x in tl.static_range(word_runs(S, True)):
        low, third = load_words(k, S, tile * N, line, static, thread, x * 4 * V)
        pairs = pairs + key_pairs(low, S, N)
        thirds = thirds + key_pairs(third, S, N)
    if S.axis == "channel":
        qk = _scores_of_channels(queries, pairs, thirds, k, S, tile, M, N, T, PRECISION)
    else:
        qk = _scores_of_tokens(queries, pairs, thirds, k, S, tile * N, line, static, M, N, T, PRECISION)
    return (tl.trans(qk),)


@triton.jit
def key_pairs(words, S: tl.constexpr, N: tl.constexpr):
    """(low halves, high halves) of words [N / 8, 8, 4, V] as pairs [N / 8, 8, 4, 2], or [N / 8, 8, 4] where a plane
    takes two fields."""
    V: tl.constexpr = words_per_thread(S, True)
    if V == 4:
        first, second = tl.split(tl.reshape(words, [N // 8, 8, 4, 2, 2]))
    elif V == 2 and not pairs_within_word(S, True):
        first, second = tl.split(words)
    else:
        first = tl.reshape(words, [N // 8, 8, 4]) if V == 1 else words
        second = first >> (group_fields(S) // 2 * S.field_bits)
    return pair_up(first, second)


@triton.jit
def key_operand(pairs, thirds, negative, S: tl.constexpr, plane: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """[N, 16]: the subnormal numbers of a plane. negative: `pair_signs` [N / 8, 8, 4, 2] if S has signs."""
    POSITION: tl.constexpr = plane_position(S, True, plane)
    INDEX: tl.constexpr = POSITION[0] * 2 + POSITION[1]
    codes = field_codes(pairs[INDEX], thirds[INDEX], S, POSITION[2])
    if fields_per_plane(S, True) == 2:
        codes = tl.join(codes, field_codes(pairs[INDEX], thirds[INDEX], S, POSITION[2] + 1))
    if S.sign_bits > 0:
        codes |= negative
    return tl.reshape(pairs_to_float(codes, T), [N, 16])


@triton.jit
def _scores_of_channels(
    queries, pairs, thirds, k, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = (q s) . c + q . z, with one s and z per channel of the tile."""
    V: tl.constexpr = words_per_thread(S, True)
    planes, unscaled = queries
    qk = tl.zeros([N, M], tl.float32)
    offset = tl.zeros([16, M], tl.float32)
    base = (tile * N // S.group) * S.dim
    negative = pairs[0]
    for i in tl.static_range(plane_count(S, True)):
        raw = load_plane(k.scale + base, S, i, 8, 0, None)
        if S.sign_bits > 0:
            words = load_plane(k.sign + base, S, i, 8, 0, None)
            negative = _signs_of_channels(sign_words(raw, words, S), tile * N, S, N)
        x = key_operand(pairs, thirds, negative, S, i, N, T)
        a = tl.reshape(planes[i], [4 // V, M // 8, 8, 4, V]) * scale_magnitudes(raw, S).to(T)[:, None, :, :, :]
        a = as_columns(tl.reshape(a, [4 // V, M, 4, V]), S, M)
        qk = tl.dot(x, a, qk, input_precision=PRECISION)
        if zero_source(S) != "scale":
            z = zero_points(raw, load_plane(zero_pointer(k, S) + base, S, i, 8, 0, None), S).to(T)
            offset = tl.dot(as_rows(z), as_columns(unscaled[i], S, M), offset, input_precision=PRECISION)
        elif has_zero_term(S):
            # From the rounded factors of the codes: most of the two sums cancels.
            level = tl.full([4 // V, 8, 4, V], zero_scale(S), tl.float32) / (plane_scales(S, i) * SUBNORMAL_SCALE)
            offset = tl.dot(as_rows(level.to(T)), a, offset, input_precision=PRECISION)
    if zero_source(S) == "scale":
        offset *= SUBNORMAL_SCALE
    qk = tl.reshape(qk, [N // 16, 16, M]) * SUBNORMAL_SCALE + offset[None, :, :]
    return tl.reshape(qk, [N, M])


@triton.jit
def _signs_of_channels(words, begin, S: tl.constexpr, N: tl.constexpr):
    """`pair_signs` [N / 8, 8, 4, 2] of a plane; words [4 / V, 8, 4, V] have one bit per token."""
    words = words >> (begin % S.group + tl.arange(0, 8)[None, :, None, None])
    first, second = tl.split(tl.reshape(tl.permute(words, (1, 2, 0, 3)), [8, 4, 2, 2]))
    low, high = pair_up(first, second)
    return pair_signs(low[None, :, :, :], high[None, :, :, :], 8 * tl.arange(0, N // 8)[:, None, None, None])


@triton.jit
def _scores_of_tokens(
    queries, pairs, thirds, k, S: tl.constexpr, begin, line, static, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = sum over groups of s (q_g . c_g) + z sum(q_g), with one s and z per token and group."""
    COUNT: tl.constexpr = S.dim // S.group
    WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
    planes, sums = queries
    base = k.scale + begin * COUNT
    group = tl.arange(0, WIDE) + 0 * tl.arange(0, 4)[None, None, :, None]
    mask = group < COUNT if WIDE > COUNT else None
    raw = load(base + (line * COUNT + group), static * COUNT, mask)
    s = unstack_last(tl.reshape(scale_magnitudes(raw, S).to(tl.float32) * SUBNORMAL_SCALE, [N, 4, WIDE]), N, 4, WIDE)
    words = s
    if S.sign_bits > 0:
        words = load(k.sign + begin * COUNT + (line * COUNT + group), static * COUNT, mask)
        words = unstack_last(tl.reshape(sign_words(raw, words, S), [N, 4, WIDE]), N, 4, WIDE)
    qk = tl.zeros([N, M], tl.float32)
    if has_zero_term(S):
        group = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)
        stored = load(zero_pointer(k, S) + begin * COUNT + (line * COUNT + group), static * COUNT, group < COUNT)
        if S.hybrid:
            raw = load(base + (line * COUNT + group), static * COUNT, group < COUNT)
            z = zero_points(raw, stored, S).to(T)
        else:
            z = stored.to(T)
        qk = tl.dot(tl.reshape(tl.join(z, z), [N, 16]), sums, input_precision=PRECISION)
    qk = tl.reshape(qk, [N, M // 8, 4, 2])
    negative = pairs[0]
    for g in tl.static_range(COUNT):
        low, high = _signs_of_group(words[g], S, N) if S.sign_bits > 0 else (pairs[0], pairs[0])
        part = tl.zeros([N, M], tl.float32)
        for i in tl.static_range(plane_count(S, True)):
            if plane_group(S, True, i) == g:
                if S.sign_bits > 0:
                    bit = plane_bit(S, True, i) + tl.arange(0, 2) * (1 if words_per_thread(S, True) == 2 else S.words)
                    negative = pair_signs(low, high, bit)
                x = key_operand(pairs, thirds, negative, S, i, N, T)
                part = tl.dot(x, planes[i], part, input_precision=PRECISION)
        qk += tl.reshape(part, [N, M // 8, 4, 2]) * s[g][:, None, :, None]
    return tl.reshape(qk, [N, M])


@triton.jit
def _signs_of_group(words, S: tl.constexpr, N: tl.constexpr):
    """(low, high) for `pair_signs`, [N / 8, 8, 4, 1], from words [N, 4] of one group, which have one bit per channel:
    shifted so that a thread's bits begin at bit 0."""
    thread = tl.arange(0, 4)[None, None, :, None]
    words = tl.reshape(words, [N // 8, 8, 4, 1]) >> (words_per_thread(S, True) * thread)
    return pair_up(words, words >> (group_fields(S) // 2 * S.words))


KEYS = KeyReader("uniform.keys", subtiles=False, table=nothing, queries=queries, scores=scores)
