"""Sums of uniform codes, see `fold.py`: channels are the rows of products, queries the columns, tokens are summed."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.spec import get
from kvq_kernels.decode_attention.uniform import (
    adds_zero,
    beside,
    field_codes,
    group_fields,
    load_words,
    numbers,
    pair_up,
    plane_bit,
    plane_count,
    plane_group,
    plane_place,
    runs,
    scales,
    shares,
    sign_pairs,
    signs,
    thread_words,
    zero_part,
    zero_scale,
    zeros,
)
from kvq_kernels.decode_attention.uniform_rows import (
    all_seen,
    as_factors,
    load_rows,
    row_channels,
    row_seen,
    row_units,
    rows,
)
from kvq_kernels.decode_attention.vector_codebook import apart


@triton.jit
def fold_nothing(S: tl.constexpr, M: tl.constexpr):
    """`acc` of no tokens: planes, and where scales are per token the sums of zero-points."""
    planes = ()
    for _ in tl.static_range(plane_count(S, False)):
        planes = planes + (tl.zeros([rows(S), M], tl.float32),)
    if get(S, "axis") == "token":
        return planes, tl.zeros([16, M], tl.float32)
    else:
        return planes, 0.0


@triton.jit
def fold_load(v, S: tl.constexpr, begin, M: tl.constexpr, N: tl.constexpr):
    """What `fold_values` takes of tokens begin, ..., begin + N - 1: words, third bits, and where scales are per token,
    scales, zero-points and words of sign bits. To be asked for before the weights are made, so that they come
    meanwhile; but after the scores: of layouts, Triton then takes that of these loads."""
    V: tl.constexpr = thread_words(S, False)
    WORDS: tl.constexpr = 8 // shares(S, False)
    own = tl.arange(0, N // 4)[:, None, None, None]
    own = own % 2 * (N // 2) + own // 4 * 8 + own // 2 % 2
    line = tl.arange(0, 4)[None, None, :, None] * 2
    thread = tl.max_contiguous(tl.arange(0, 8)[None, :, None, None], [1, 1, 1, 1])
    word = thread % WORDS * V + tl.arange(0, V)
    words, thirds = (), ()
    for x in tl.static_range(runs(S, False)):
        low, third = load_words(v, S, begin, line, own, word, x * WORDS * V)
        words, thirds = words + (low,), thirds + (third,)
    s, z, negative = (), (), ()
    if get(S, "axis") == "token":
        COUNT: tl.constexpr = get(S, "dim") // get(S, "group")
        WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
        group = tl.arange(0, WIDE)[None, None, None, :] + 0 * tl.arange(0, M)[None, :, None, None]
        s = scales(load_groups(v[1] + begin * COUNT, line, own, group, S), S)
        if get(S, "sign_bits") > 0:
            group = tl.arange(0, WIDE)[None, None, None, :] + 0 * tl.arange(0, 8)[None, :, None, None]
            raw = load_groups(v[1] + begin * COUNT, line, own, group, S)
            negative = signs(raw, load_groups(v[3] + begin * COUNT, line, own, group, S), S)
        if adds_zero(S):
            # Those of the last group again and again, as rows of a product.
            group = tl.max_contiguous(tl.minimum(tl.arange(0, 8)[None, :, None, None], COUNT - 1), [1, 1, 1, 1])
            z = load_groups(v[zero_part(S)] + begin * COUNT, line, own, group, S)
            if get(S, "hybrid"):
                z = zeros(load_groups(v[1] + begin * COUNT, line, own, group, S), z, S)
    return words, thirds, s, z, negative


@triton.jit
def load_groups(pointer, line, own, group, S: tl.constexpr):
    """What lies at tokens line + own and groups `group` of channels; 0 where there is none."""
    COUNT: tl.constexpr = get(S, "dim") // get(S, "group")
    return load(pointer + (line * COUNT + group), own * COUNT, group < COUNT if group.shape[3] > COUNT else None)


@triton.jit
def fold_values(
    acc, weights, shrink, loaded, v, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """acc shrink + weights V. acc: planes [rows, M], and where scales are per token sums of zero-points [16, M]; then
    the planes are less by `row_units`."""
    words, third_words, s, z, negative = loaded
    pairs, thirds = (), ()
    for x in tl.static_range(runs(S, False)):
        pairs = pairs + value_pairs(words[x], S, N)
        thirds = thirds + value_pairs(third_words[x], S, N)
    if get(S, "axis") == "channel":
        return _values_of_channels(acc, weights, shrink, pairs, thirds, v, S, tile, M, N, T, P)
    else:
        return _values_of_tokens(acc, weights, shrink, pairs, thirds, s, z, negative, S, M, N, T, P)


@triton.jit
def by_two(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, E: tl.constexpr):
    """What the tokens that go together have, [A, B, C, E] each, of x [2 A, B, C, E]."""
    return tl.split(tl.permute(tl.reshape(x, [A, 2, B, C, E]), (0, 2, 3, 4, 1)))


@triton.jit
def value_pairs(words, S: tl.constexpr, N: tl.constexpr):
    """Words [N / 4, 8, 4, V] as pairs of tokens [N / 8, 8, 4, V], of their low and their high halves."""
    SHARES: tl.constexpr = shares(S, False)
    if SHARES > 1:
        PART: tl.constexpr = group_fields(S) // SHARES * get(S, "field_bits")
        words = words >> (tl.arange(0, 8)[None, :, None, None] // (8 // SHARES) * PART)
    first, second = by_two(words, N // 8, 8, 4, thread_words(S, False))
    return pair_up(first, second)


@triton.jit
def value_operand(pairs, thirds, negative, S: tl.constexpr, number: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """[rows, N]: the numbers of a plane. negative: `sign_pairs` [N / 8, 8, 4, rows / 8] if S has signs."""
    PLACE: tl.constexpr = plane_place(S, False, number)
    OWN: tl.constexpr = PLACE[0] * 2 + PLACE[1]
    codes = field_codes(pairs[OWN], thirds[OWN], S, PLACE[2])
    if beside(S, False) == 2:
        codes = tl.join(codes, field_codes(pairs[OWN], thirds[OWN], S, PLACE[2] + 1))
        codes = tl.reshape(codes, [N // 8, 8, 4, 2])
    if get(S, "sign_bits") > 0:
        codes |= negative
    x = tl.reshape(numbers(codes, T), [N // 16, 2, 8, 4, rows(S) // 8, 2])
    return tl.reshape(tl.permute(x, (4, 2, 0, 3, 1, 5)), [rows(S), N])


@triton.jit
def by_threads(weights, M: tl.constexpr, N: tl.constexpr):
    """[M, N] as words lie, [N / 16, 4, M, 4]: of two tokens that go together, the second is N / 2 after the first."""
    x = tl.permute(tl.reshape(weights, [M, 2, N // 16, 4, 2]), (2, 4, 1, 0, 3))
    return tl.reshape(x, [N // 16, 4, M, 4])


@triton.jit
def token_rows(x, M: tl.constexpr, N: tl.constexpr):
    """[N / 16, 4, M, 4]: a thread's tokens, queries, threads, as the other side of a product, [N, M]."""
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), [N, M])


@triton.jit
def _values_of_channels(
    acc, weights, shrink, pairs, thirds, v, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """sum_t p (s c + z) = s (sum_t p c) + z sum_t p, with one s and z per channel of the tile."""
    MORE: tl.constexpr = rows(S) // 8
    planes, offsets = acc
    weights = weights.to(T)
    base = (tile * N // get(S, "group")) * get(S, "dim")
    mass = tl.sum(weights.to(tl.float32), axis=1)
    columns = token_rows(by_threads(weights, M, N), M, N)
    more = tl.arange(0, MORE)
    new = ()
    negative = pairs[0]
    for i in tl.static_range(plane_count(S, False)):
        raw = load_rows(v[1] + base, S, i)
        kept = raw if zero_part(S) < 2 else load_rows(v[zero_part(S)] + base, S, i)
        if get(S, "sign_bits") > 0:
            words = kept if zero_part(S) == 3 else load_rows(v[3] + base, S, i)
            negative = _signs_of_channels(signs(raw, words, S), tile * N, S, N)
        x = value_operand(pairs, thirds, negative, S, i, N, T)
        s = as_factors(scales(raw, S), S) * row_units(S, i, more[:, None, None, None, None])
        if zero_part(S) > 1:
            x = tl.reshape(tl.dot(x, columns, input_precision=P), [MORE, 8, M // 8, 4, 2]) * s
            x += tl.reshape(mass, [1, 1, M // 8, 4, 2]) * as_factors(zeros(raw, kept, S), S)
        else:
            level = zero_scale(S) / row_units(S, i, tl.arange(0, rows(S)) // 8)
            x = tl.dot(x, columns, mass[None, :] * level[:, None], input_precision=P)
            x = tl.reshape(x, [MORE, 8, M // 8, 4, 2]) * s
        new = new + (shrunk(planes[i], shrink) + tl.reshape(x, [rows(S), M]),)
    return new, offsets


@triton.jit
def _signs_of_channels(words, begin, S: tl.constexpr, N: tl.constexpr):
    """`sign_pairs` of a plane [N / 8, 8, 4, rows / 8]; words of `load_rows`, of whose bits a token has one."""
    words = words >> (begin % get(S, "group") + 2 * tl.arange(0, 4)[None, None, :, None])
    words = tl.reshape(tl.permute(words, (1, 2, 0, 3)), [1, 8, 4, rows(S) // 8])
    own = pair_up(words, words >> (N // 2))[0]
    pair = tl.arange(0, N // 8)[:, None, None, None]
    return sign_pairs(own, own, pair // 2 * 8 + pair % 2)


@triton.jit
def _values_of_tokens(
    acc, weights, shrink, pairs, thirds, s, z, negative, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """sum_t p (s c + z) = sum_t (p s) c + sum_t p z, with one s and z per token and group of channels."""
    COUNT: tl.constexpr = get(S, "dim") // get(S, "group")
    WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
    planes, offsets = acc
    mine = by_threads(weights.to(T), M, N)
    if adds_zero(S):
        z = tl.permute(tl.reshape(z.to(T), [N // 16, 4, 8, 4]), (2, 0, 3, 1))
        z = tl.reshape(tl.permute(tl.join(z, z), (4, 0, 1, 2, 3)), [16, N])
        offsets = tl.dot(z, token_rows(mine, M, N), shrunk(offsets, shrink), input_precision=P)
    s = apart(tl.reshape(s.to(T), [N // 4 * M, 4, WIDE]), N // 4 * M, 4, WIDE)
    halves, scaled = (), ()
    for g in tl.static_range(COUNT):
        scaled = scaled + (token_rows(mine * tl.reshape(s[g], [N // 16, 4, M, 4]), M, N),)
    if get(S, "sign_bits") > 0:
        negative = apart(tl.reshape(negative, [N // 4 * 8, 4, WIDE]), N // 4 * 8, 4, WIDE)
        for g in tl.static_range(COUNT):
            halves = halves + (_signs_of_group(negative[g], S, N),)
    new = ()
    own = pairs[0]
    for i in tl.static_range(plane_count(S, False)):
        if get(S, "sign_bits") > 0:
            bit = plane_bit(S, False, i) + tl.arange(0, rows(S) // 8) * (
                get(S, "words") if thread_words(S, False) == 1 else 1
            )
            low, high = halves[plane_group(S, False, i)]
            own = sign_pairs(low, high, bit)
        x = value_operand(pairs, thirds, own, S, i, N, T)
        new = new + (tl.dot(x, scaled[plane_group(S, False, i)], shrunk(planes[i], shrink), input_precision=P),)
    return new, offsets


@triton.jit
def _signs_of_group(words, S: tl.constexpr, N: tl.constexpr):
    """The halves that `sign_pairs` takes, [N / 8, 8, 4, 1]; words [N / 4 * 8, 4] of one group, of whose bits a channel
    has one. Those of a thread begin at bit 0."""
    V: tl.constexpr = thread_words(S, False)
    WORDS: tl.constexpr = 8 // shares(S, False)
    thread = tl.arange(0, 8)[None, :, None, None]
    share = thread // WORDS * (group_fields(S) // shares(S, False) * get(S, "words"))
    first, second = by_two(tl.reshape(words, [N // 4, 8, 4, 1]) >> (share + thread % WORDS * V), N // 8, 8, 4, 1)
    return pair_up(first, second)


@triton.jit
def shrunk(sums, shrink):
    """Sums times `shrink` [M]; None: 1."""
    if shrink is None:
        return sums
    else:
        return sums * shrink[None, :]


@triton.jit
def fold_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    planes, offsets = acc
    member, row = tl.arange(0, M)[None, :], tl.arange(0, rows(S))
    for i in tl.static_range(plane_count(S, False)):
        channel, own = row_channels(S, i, row % 8, row // 8)
        x = planes[i] if get(S, "axis") == "channel" else planes[i] * row_units(S, i, row // 8)[:, None]
        if get(S, "axis") == "token" and adds_zero(S):
            here = tl.arange(0, 16)[:, None] == plane_group(S, False, i)
            x += tl.sum(tl.where(here, offsets, 0.0), axis=0)[None, :] * zero_scale(S)
        mine = member < GROUP
        if not all_seen(S):
            mine &= row_seen(S, i, row % 8, row // 8)[:, None]
        tl.store(out[None, :] + (channel + own)[:, None], x / total[None, :], mask=mine)
