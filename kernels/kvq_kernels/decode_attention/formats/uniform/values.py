"""p V of uniform codes: channels are the rows of the products, query heads the columns, tokens the inner dimension.

Shared arithmetic is in `planes.py`, loads per channel in `rows.py`; `keys.py` is the other side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.format import ValueReader
from kvq_kernels.decode_attention.formats.shared import nothing
from kvq_kernels.decode_attention.formats.uniform.planes import (
    field_codes,
    field_shares,
    fields_per_plane,
    group_fields,
    has_zero_term,
    load_words,
    pair_signs,
    pair_up,
    pairs_to_float,
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
from kvq_kernels.decode_attention.formats.uniform.rows import (
    all_rows_valid,
    as_factors,
    load_rows,
    plane_rows,
    row_channels,
    row_scales,
    row_valid,
)
from kvq_kernels.decode_attention.layout_hints import load, unstack_last


@triton.jit
def init(C: tl.constexpr):
    """Empty accumulator: a plane each [rows, M], and with scales per token the sums of p times zero-points."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    planes = ()
    for _ in tl.static_range(plane_count(S, False)):
        planes = planes + (tl.zeros([plane_rows(S), M], tl.float32),)
    if S.axis == "token":
        return planes, tl.zeros([16, M], tl.float32)
    else:
        return planes, 0.0


@triton.jit
def prefetch(v, tile, C: tl.constexpr):
    """Loads for `accumulate` of tile `tile`: (words, third bits, and with scales per token
    scales, zero-points, words of signs).

    Issued before the softmax, to overlap with it, but after the scores: Triton then keeps the layout of these loads.
    """
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    V: tl.constexpr = words_per_thread(S, False)
    WORDS: tl.constexpr = 8 // field_shares(S, False)
    begin = tile * N
    static = tl.arange(0, N // 4)[:, None, None, None]
    static = static % 2 * (N // 2) + static // 4 * 8 + static // 2 % 2
    line = tl.arange(0, 4)[None, None, :, None] * 2
    thread = tl.max_contiguous(tl.arange(0, 8)[None, :, None, None], [1, 1, 1, 1])
    word = thread % WORDS * V + tl.arange(0, V)
    words, thirds = (), ()
    for x in tl.static_range(word_runs(S, False)):
        low, third = load_words(v, S, begin, line, static, word, x * WORDS * V)
        words, thirds = words + (low,), thirds + (third,)
    s, z, negative = (), (), ()
    if S.axis == "token":
        COUNT: tl.constexpr = S.dim // S.group
        WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
        group = tl.arange(0, WIDE)[None, None, None, :] + 0 * tl.arange(0, M)[None, :, None, None]
        s = scale_magnitudes(load_groups(v.scale + begin * COUNT, line, static, group, S), S)
        if S.sign_bits > 0:
            group = tl.arange(0, WIDE)[None, None, None, :] + 0 * tl.arange(0, 8)[None, :, None, None]
            raw = load_groups(v.scale + begin * COUNT, line, static, group, S)
            negative = sign_words(raw, load_groups(v.sign + begin * COUNT, line, static, group, S), S)
        if has_zero_term(S):
            # As rows of a product: the last group is repeated.
            group = tl.max_contiguous(tl.minimum(tl.arange(0, 8)[None, :, None, None], COUNT - 1), [1, 1, 1, 1])
            z = load_groups(zero_pointer(v, S) + begin * COUNT, line, static, group, S)
            if S.hybrid:
                z = zero_points(load_groups(v.scale + begin * COUNT, line, static, group, S), z, S)
    return words, thirds, s, z, negative


@triton.jit
def load_groups(pointer, line, static, group, S: tl.constexpr):
    """Values of tokens line + static and groups `group` of channels; 0 beyond the last group."""
    COUNT: tl.constexpr = S.dim // S.group
    return load(pointer + (line * COUNT + group), static * COUNT, group < COUNT if group.shape[3] > COUNT else None)


@triton.jit
def accumulate(acc, p, alpha, prefetched, table, v, tile, C: tl.constexpr):
    """acc alpha + p V. acc: planes [rows, M], and with scales per token sums of p times zero-points [16, M]; the planes
    are then without `row_scales`."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    T: tl.constexpr = C.T
    PRECISION: tl.constexpr = C.PRECISION
    words, third_words, s, z, negative = prefetched
    pairs, thirds = (), ()
    for x in tl.static_range(word_runs(S, False)):
        pairs = pairs + value_pairs(words[x], S, N)
        thirds = thirds + value_pairs(third_words[x], S, N)
    if S.axis == "channel":
        return _values_of_channels(acc, p[0], alpha, pairs, thirds, v, S, tile, M, N, T, PRECISION)
    else:
        return _values_of_tokens(acc, p[0], alpha, pairs, thirds, s, z, negative, S, M, N, T, PRECISION)


@triton.jit
def by_two(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, E: tl.constexpr):
    """Even and odd entries of the first axis of x [2 A, B, C, E], [A, B, C, E] each: a pair's two tokens."""
    return tl.split(tl.permute(tl.reshape(x, [A, 2, B, C, E]), (0, 2, 3, 4, 1)))


@triton.jit
def value_pairs(words, S: tl.constexpr, N: tl.constexpr):
    """(low halves, high halves) of words [N / 4, 8, 4, V] as pairs of tokens [N / 8, 8, 4, V]."""
    SHARES: tl.constexpr = field_shares(S, False)
    if SHARES > 1:
        PART: tl.constexpr = group_fields(S) // SHARES * S.field_bits
        words = words >> (tl.arange(0, 8)[None, :, None, None] // (8 // SHARES) * PART)
    first, second = by_two(words, N // 8, 8, 4, words_per_thread(S, False))
    return pair_up(first, second)


@triton.jit
def value_operand(pairs, thirds, negative, S: tl.constexpr, plane: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """[rows, N]: the subnormal numbers of a plane. negative: `pair_signs` [N / 8, 8, 4, rows / 8] if S has signs."""
    POSITION: tl.constexpr = plane_position(S, False, plane)
    INDEX: tl.constexpr = POSITION[0] * 2 + POSITION[1]
    codes = field_codes(pairs[INDEX], thirds[INDEX], S, POSITION[2])
    if fields_per_plane(S, False) == 2:
        codes = tl.join(codes, field_codes(pairs[INDEX], thirds[INDEX], S, POSITION[2] + 1))
        codes = tl.reshape(codes, [N // 8, 8, 4, 2])
    if S.sign_bits > 0:
        codes |= negative
    x = tl.reshape(pairs_to_float(codes, T), [N // 16, 2, 8, 4, plane_rows(S) // 8, 2])
    return tl.reshape(tl.permute(x, (4, 2, 0, 3, 1, 5)), [plane_rows(S), N])


@triton.jit
def by_threads(p, M: tl.constexpr, N: tl.constexpr):
    """p [M, N] in the layout of words, [N / 16, 4, M, 4]: the second token of a pair is N / 2 after the first."""
    x = tl.permute(tl.reshape(p, [M, 2, N // 16, 4, 2]), (2, 4, 1, 0, 3))
    return tl.reshape(x, [N // 16, 4, M, 4])


@triton.jit
def token_rows(x, M: tl.constexpr, N: tl.constexpr):
    """[N / 16, 4, M, 4] (a thread's tokens, queries, threads) as right operand [N, M]."""
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), [N, M])


@triton.jit
def _values_of_channels(
    acc, p, alpha, pairs, thirds, v, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_t p (s c + z) = s (sum_t p c) + z sum_t p, with one s and z per channel of the tile."""
    REGISTERS: tl.constexpr = plane_rows(S) // 8
    planes, offsets = acc
    p = p.to(T)
    base = (tile * N // S.group) * S.dim
    p_sum = tl.sum(p.to(tl.float32), axis=1)
    columns = token_rows(by_threads(p, M, N), M, N)
    register = tl.arange(0, REGISTERS)
    new = ()
    negative = pairs[0]
    for i in tl.static_range(plane_count(S, False)):
        raw = load_rows(v.scale + base, S, i)
        stored = raw if zero_source(S) == "scale" else load_rows(zero_pointer(v, S) + base, S, i)
        if S.sign_bits > 0:
            words = stored if zero_source(S) == "sign" else load_rows(v.sign + base, S, i)
            negative = _signs_of_channels(sign_words(raw, words, S), tile * N, S, N)
        x = value_operand(pairs, thirds, negative, S, i, N, T)
        s = as_factors(scale_magnitudes(raw, S), S) * row_scales(S, i, register[:, None, None, None, None])
        if zero_source(S) != "scale":
            x = tl.reshape(tl.dot(x, columns, input_precision=PRECISION), [REGISTERS, 8, M // 8, 4, 2]) * s
            x += tl.reshape(p_sum, [1, 1, M // 8, 4, 2]) * as_factors(zero_points(raw, stored, S), S)
        else:
            level = zero_scale(S) / row_scales(S, i, tl.arange(0, plane_rows(S)) // 8)
            x = tl.dot(x, columns, p_sum[None, :] * level[:, None], input_precision=PRECISION)
            x = tl.reshape(x, [REGISTERS, 8, M // 8, 4, 2]) * s
        new = new + (rescaled(planes[i], alpha) + tl.reshape(x, [plane_rows(S), M]),)
    return new, offsets


@triton.jit
def _signs_of_channels(words, begin, S: tl.constexpr, N: tl.constexpr):
    """`pair_signs` [N / 8, 8, 4, rows / 8] of a plane; words (of `load_rows`) have one bit per token."""
    words = words >> (begin % S.group + 2 * tl.arange(0, 4)[None, None, :, None])
    words = tl.reshape(tl.permute(words, (1, 2, 0, 3)), [1, 8, 4, plane_rows(S) // 8])
    halves = pair_up(words, words >> (N // 2))[0]
    pair = tl.arange(0, N // 8)[:, None, None, None]
    return pair_signs(halves, halves, pair // 2 * 8 + pair % 2)


@triton.jit
def _values_of_tokens(
    acc, p, alpha, pairs, thirds, s, z, negative, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_t p (s c + z) = sum_t (p s) c + sum_t p z, with one s and z per token and group of channels."""
    COUNT: tl.constexpr = S.dim // S.group
    WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
    planes, offsets = acc
    by_thread = by_threads(p.to(T), M, N)
    if has_zero_term(S):
        z = tl.permute(tl.reshape(z.to(T), [N // 16, 4, 8, 4]), (2, 0, 3, 1))
        z = tl.reshape(tl.permute(tl.join(z, z), (4, 0, 1, 2, 3)), [16, N])
        offsets = tl.dot(z, token_rows(by_thread, M, N), rescaled(offsets, alpha), input_precision=PRECISION)
    s = unstack_last(tl.reshape(s.to(T), [N // 4 * M, 4, WIDE]), N // 4 * M, 4, WIDE)
    halves, scaled = (), ()
    for g in tl.static_range(COUNT):
        scaled = scaled + (token_rows(by_thread * tl.reshape(s[g], [N // 16, 4, M, 4]), M, N),)
    if S.sign_bits > 0:
        negative = unstack_last(tl.reshape(negative, [N // 4 * 8, 4, WIDE]), N // 4 * 8, 4, WIDE)
        for g in tl.static_range(COUNT):
            halves = halves + (_signs_of_group(negative[g], S, N),)
    new = ()
    signs = pairs[0]
    for i in tl.static_range(plane_count(S, False)):
        if S.sign_bits > 0:
            bit = plane_bit(S, False, i) + tl.arange(0, plane_rows(S) // 8) * (
                S.words if words_per_thread(S, False) == 1 else 1
            )
            low, high = halves[plane_group(S, False, i)]
            signs = pair_signs(low, high, bit)
        x = value_operand(pairs, thirds, signs, S, i, N, T)
        new = new + (
            tl.dot(x, scaled[plane_group(S, False, i)], rescaled(planes[i], alpha), input_precision=PRECISION),
        )
    return new, offsets


@triton.jit
def _signs_of_group(words, S: tl.constexpr, N: tl.constexpr):
    """(low, high) for `pair_signs`, [N / 8, 8, 4, 1], from words [N / 4 * 8, 4] of one group, which have one bit per
    channel: shifted so that a thread's bits begin at bit 0."""
    V: tl.constexpr = words_per_thread(S, False)
    WORDS: tl.constexpr = 8 // field_shares(S, False)
    thread = tl.arange(0, 8)[None, :, None, None]
    share = thread // WORDS * (group_fields(S) // field_shares(S, False) * S.words)
    first, second = by_two(tl.reshape(words, [N // 4, 8, 4, 1]) >> (share + thread % WORDS * V), N // 8, 8, 4, 1)
    return pair_up(first, second)


@triton.jit
def rescaled(sums, alpha):
    """Accumulator times `alpha` [M]; None: 1."""
    if alpha is None:
        return sums
    else:
        return sums * alpha[None, :]


@triton.jit
def store(acc, out, l_i, C: tl.constexpr):
    """See `ValueReader`."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    planes, offsets = acc
    member, row = tl.arange(0, M)[None, :], tl.arange(0, plane_rows(S))
    for i in tl.static_range(plane_count(S, False)):
        channel, static = row_channels(S, i, row % 8, row // 8)
        x = planes[i] if S.axis == "channel" else planes[i] * row_scales(S, i, row // 8)[:, None]
        if S.axis == "token" and has_zero_term(S):
            of_group = tl.arange(0, 16)[:, None] == plane_group(S, False, i)
            x += tl.sum(tl.where(of_group, offsets, 0.0), axis=0)[None, :] * zero_scale(S)
        mask = member < GROUP
        if not all_rows_valid(S):
            mask &= row_valid(S, i, row % 8, row // 8)[:, None]
        tl.store(out[None, :] + (channel + static)[:, None], x / l_i[None, :], mask=mask)


VALUES = ValueReader(
    "uniform.values",
    subtiles=False,
    table=nothing,
    init=init,
    prefetch=prefetch,
    accumulate=accumulate,
    store=store,
)
