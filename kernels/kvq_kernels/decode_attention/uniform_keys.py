"""Scores of uniform codes, see `fold.py`: tokens are the rows of products, queries the columns."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.spec import get
from kvq_kernels.decode_attention.uniform import (
    UNIT,
    adds_zero,
    beside,
    field_codes,
    field_unit,
    group_fields,
    half_fields,
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
    within_words,
    zero_part,
    zero_scale,
    zeros,
)
from kvq_kernels.decode_attention.vector_codebook import apart


@triton.jit
def load_plane(pointer, S: tl.constexpr, number: tl.constexpr, M: tl.constexpr, stride, count):
    """[4 / V, M, 4, V] at the channels of a plane from pointer + m stride on, m below `count` (None: all); else 0."""
    V: tl.constexpr = thread_words(S, True)
    W: tl.constexpr = get(S, "words")
    PLACE: tl.constexpr = plane_place(S, True, number)
    thread = tl.arange(0, 4)[None, None, :, None]
    if V == 1:
        thread = tl.max_contiguous(thread, [1, 1, 1, 1])
    word = thread * V + tl.arange(0, V)
    member = tl.arange(0, M)[None, :, None, None]
    own = tl.arange(0, 4 // V)[:, None, None, None]
    SHARE: tl.constexpr = group_fields(S) // shares(S, True)
    field = own // 2 + own % 2 * SHARE if V == 1 else own * SHARE if within_words(S, True) else own
    # What is known when this is compiled comes last, so that it becomes part of the instructions.
    first = (PLACE[2] + half_fields(S) * PLACE[1]) * W + PLACE[0] * 4 * V
    if runs(S, True) * 4 * V > W:
        seen = word < W - PLACE[0] * 4 * V
        seen = seen if count is None else seen & (member < count)
    else:
        seen = None if count is None else (word >= 0) & (member < count)
    return load(pointer + (member * stride + word), field * W + first, seen)


@triton.jit
def as_rows(x):
    """[4 / V, 8, 4, V] as one side of a product, [16, 16]: threads, then what each of them has; all rows twice."""
    x = tl.reshape(tl.permute(x, (1, 2, 0, 3)), [8, 16])
    return tl.reshape(tl.permute(tl.join(x, x), (2, 0, 1)), [16, 16])


@triton.jit
def as_columns(x, S: tl.constexpr, M: tl.constexpr):
    """[4 / V, M, 4, V] as the other side, [16, M]."""
    if within_words(S, True) and thread_words(S, True) == 2:
        return tl.reshape(tl.permute(x, (2, 3, 0, 1)), [16, M])
    else:
        return tl.reshape(tl.permute(x, (2, 0, 3, 1)), [16, M])


@triton.jit
def fold_queries(q, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, T: tl.constexpr):
    """Planes of the queries, as what reads the codes takes them: where scales are per channel, [4 / V, M, 4, V] times
    `field_unit`, and as they are; where they are per token, as columns, and the sums of each group."""
    D: tl.constexpr = get(S, "dim")
    planes, whole = (), ()
    for i in tl.static_range(plane_count(S, True)):
        x = load_plane(q, S, i, M, D, GROUP).to(tl.float32)
        unit = plane_units(S, i)
        if get(S, "axis") == "token":
            planes = planes + (as_columns((x * unit).to(T), S, M),)
        else:
            planes = planes + ((x * unit).to(T),)
            whole = whole + (x.to(T),)
    if get(S, "axis") == "token":
        whole = group_sums(q, S, GROUP, M, T)
    return planes, whole


@triton.jit
def plane_units(S: tl.constexpr, number: tl.constexpr):
    """`field_unit` of the numbers of a plane, [4 / V, 1, 1, 1]."""
    V: tl.constexpr = thread_words(S, True)
    PLACE: tl.constexpr = plane_place(S, True, number)
    NEXT: tl.constexpr = PLACE[2] + beside(S, True) - 1
    at = tl.arange(0, 4 // V)[:, None, None, None]
    later = at // 2 if V == 1 else at
    return tl.where(later == 0, field_unit(S, PLACE[2]), field_unit(S, NEXT))


@triton.jit
def group_sums(q, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, T: tl.constexpr):
    """[16, M]: sums of the queries over each group of channels, times `zero_scale`, rounded; below each, what it is
    more than that."""
    D: tl.constexpr = get(S, "dim")
    G: tl.constexpr = get(S, "group")
    member, within = tl.arange(0, M)[:, None], tl.arange(0, triton.next_power_of_2(G))[None, :]
    row = tl.arange(0, 16)[:, None]
    group, rest = row // 2, row % 2 == 1
    found = tl.zeros([16, M], tl.float32)
    for g in tl.static_range(D // G):
        x = tl.load(q + member * D + g * G + within, mask=(member < GROUP) & (within < G), other=0.0)
        found = tl.where(group == g, tl.sum(x.to(tl.float32), axis=1)[None, :], found)
    found *= zero_scale(S)
    rounded = found.to(T)
    return tl.where(rest, (found - rounded.to(tl.float32)).to(T), rounded)


@triton.jit
def fold_scores(queries, k, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr):
    """q . k of tokens tile N, ..., tile N + N - 1, float32 [M, N]. queries: of `fold_queries`."""
    V: tl.constexpr = thread_words(S, True)
    own, line = tl.arange(0, N // 8)[:, None, None, None] * 8, tl.arange(0, 8)[None, :, None, None]
    thread = tl.arange(0, 4)[None, None, :, None] * V + tl.arange(0, V)
    pairs, thirds = (), ()
    for x in tl.static_range(runs(S, True)):
        low, third = load_words(k, S, tile * N, line, own, thread, x * 4 * V)
        pairs = pairs + key_pairs(low, S, N)
        thirds = thirds + key_pairs(third, S, N)
    if get(S, "axis") == "channel":
        scores = _scores_of_channels(queries, pairs, thirds, k, S, tile, M, N, T, P)
    else:
        scores = _scores_of_tokens(queries, pairs, thirds, k, S, tile * N, line, own, M, N, T, P)
    return tl.trans(scores)


@triton.jit
def key_pairs(words, S: tl.constexpr, N: tl.constexpr):
    """Words [N / 8, 8, 4, V] as pairs [N / 8, 8, 4, 2] or, where a plane takes two fields, [N / 8, 8, 4], of their low
    and their high halves."""
    V: tl.constexpr = thread_words(S, True)
    if V == 4:
        first, second = tl.split(tl.reshape(words, [N // 8, 8, 4, 2, 2]))
    elif V == 2 and not within_words(S, True):
        first, second = tl.split(words)
    else:
        first = tl.reshape(words, [N // 8, 8, 4]) if V == 1 else words
        second = first >> (group_fields(S) // 2 * get(S, "field_bits"))
    return pair_up(first, second)


@triton.jit
def key_operand(pairs, thirds, negative, S: tl.constexpr, number: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """[N, 16]: the numbers of a plane, less by UNIT and `field_unit`. negative: `sign_pairs` [N / 8, 8, 4, 2] if S has
    signs."""
    PLACE: tl.constexpr = plane_place(S, True, number)
    OWN: tl.constexpr = PLACE[0] * 2 + PLACE[1]
    codes = field_codes(pairs[OWN], thirds[OWN], S, PLACE[2])
    if beside(S, True) == 2:
        codes = tl.join(codes, field_codes(pairs[OWN], thirds[OWN], S, PLACE[2] + 1))
    if get(S, "sign_bits") > 0:
        codes |= negative
    return tl.reshape(numbers(codes, T), [N, 16])


@triton.jit
def _scores_of_channels(
    queries, pairs, thirds, k, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = (q s) . c + q . z, with one s and z per channel of the tile."""
    V: tl.constexpr = thread_words(S, True)
    planes, whole = queries
    scores = tl.zeros([N, M], tl.float32)
    offset = tl.zeros([16, M], tl.float32)
    base = (tile * N // get(S, "group")) * get(S, "dim")
    negative = pairs[0]
    for i in tl.static_range(plane_count(S, True)):
        raw = load_plane(k[1] + base, S, i, 8, 0, None)
        if get(S, "sign_bits") > 0:
            words = load_plane(k[3] + base, S, i, 8, 0, None)
            negative = _signs_of_channels(signs(raw, words, S), tile * N, S, N)
        x = key_operand(pairs, thirds, negative, S, i, N, T)
        a = tl.reshape(planes[i], [4 // V, M // 8, 8, 4, V]) * scales(raw, S).to(T)[:, None, :, :, :]
        a = as_columns(tl.reshape(a, [4 // V, M, 4, V]), S, M)
        scores = tl.dot(x, a, scores, input_precision=P)
        if zero_part(S) > 1:
            z = zeros(raw, load_plane(k[zero_part(S)] + base, S, i, 8, 0, None), S).to(T)
            offset = tl.dot(as_rows(z), as_columns(whole[i], S, M), offset, input_precision=P)
        elif adds_zero(S):
            # Of what the codes are multiplied by, rounded as it is: most of the two sums cancels.
            level = tl.full([4 // V, 8, 4, V], zero_scale(S), tl.float32) / (plane_units(S, i) * UNIT)
            offset = tl.dot(as_rows(level.to(T)), a, offset, input_precision=P)
    if zero_part(S) == 1:
        offset *= UNIT
    scores = tl.reshape(scores, [N // 16, 16, M]) * UNIT + offset[None, :, :]
    return tl.reshape(scores, [N, M])


@triton.jit
def _signs_of_channels(words, begin, S: tl.constexpr, N: tl.constexpr):
    """`sign_pairs` of a plane [N / 8, 8, 4, 2]; words [4 / V, 8, 4, V], of whose bits a token has one."""
    words = words >> (begin % get(S, "group") + tl.arange(0, 8)[None, :, None, None])
    first, second = tl.split(tl.reshape(tl.permute(words, (1, 2, 0, 3)), [8, 4, 2, 2]))
    low, high = pair_up(first, second)
    return sign_pairs(low[None, :, :, :], high[None, :, :, :], 8 * tl.arange(0, N // 8)[:, None, None, None])


@triton.jit
def _scores_of_tokens(
    queries, pairs, thirds, k, S: tl.constexpr, begin, line, own, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = sum over groups of s (q_g . c_g) + z sum(q_g), with one s and z per token and group."""
    COUNT: tl.constexpr = get(S, "dim") // get(S, "group")
    WIDE: tl.constexpr = triton.next_power_of_2(COUNT)
    planes, sums = queries
    base = k[1] + begin * COUNT
    group = tl.arange(0, WIDE) + 0 * tl.arange(0, 4)[None, None, :, None]
    seen = group < COUNT if WIDE > COUNT else None
    raw = load(base + (line * COUNT + group), own * COUNT, seen)
    s = apart(tl.reshape(scales(raw, S).to(tl.float32) * UNIT, [N, 4, WIDE]), N, 4, WIDE)
    words = s
    if get(S, "sign_bits") > 0:
        words = load(k[3] + begin * COUNT + (line * COUNT + group), own * COUNT, seen)
        words = apart(tl.reshape(signs(raw, words, S), [N, 4, WIDE]), N, 4, WIDE)
    scores = tl.zeros([N, M], tl.float32)
    if adds_zero(S):
        group = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)
        kept = load(k[zero_part(S)] + begin * COUNT + (line * COUNT + group), own * COUNT, group < COUNT)
        if get(S, "hybrid"):
            raw = load(base + (line * COUNT + group), own * COUNT, group < COUNT)
            z = zeros(raw, kept, S).to(T)
        else:
            z = kept.to(T)
        scores = tl.dot(tl.reshape(tl.join(z, z), [N, 16]), sums, input_precision=P)
    scores = tl.reshape(scores, [N, M // 8, 4, 2])
    negative = pairs[0]
    for g in tl.static_range(COUNT):
        low, high = _signs_of_group(words[g], S, N) if get(S, "sign_bits") > 0 else (pairs[0], pairs[0])
        part = tl.zeros([N, M], tl.float32)
        for i in tl.static_range(plane_count(S, True)):
            if plane_group(S, True, i) == g:
                if get(S, "sign_bits") > 0:
                    bit = plane_bit(S, True, i) + tl.arange(0, 2) * (
                        1 if thread_words(S, True) == 2 else get(S, "words")
                    )
                    negative = sign_pairs(low, high, bit)
                x = key_operand(pairs, thirds, negative, S, i, N, T)
                part = tl.dot(x, planes[i], part, input_precision=P)
        scores += tl.reshape(part, [N, M // 8, 4, 2]) * s[g][:, None, :, None]
    return tl.reshape(scores, [N, M])


@triton.jit
def _signs_of_group(words, S: tl.constexpr, N: tl.constexpr):
    """The halves that `sign_pairs` takes, [N / 8, 8, 4, 1]; words [N, 4] of one group, of whose bits a channel has one.
    Those of a thread begin at bit 0."""
    thread = tl.arange(0, 4)[None, None, :, None]
    words = tl.reshape(words, [N // 8, 8, 4, 1]) >> (thread_words(S, True) * thread)
    return pair_up(words, words >> (group_fields(S) // 2 * get(S, "words")))
