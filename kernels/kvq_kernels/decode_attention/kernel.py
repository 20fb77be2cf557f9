"""The split pass: each program attends to a run of one row's tokens for all query heads of one kv head.

The first programs share the whole tiles that both sides hold packed (`main.py`), the last ones the rest: sinks, tokens
packed on one side only, recent ones. Each leaves softmax(q K^T) V of its tokens and their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import any_number, at_stored_head
from kvq_kernels.decode_attention.main_loop import attend_main, output
from kvq_kernels.decode_attention.rope import pair_channels, position_turn
from kvq_kernels.decode_attention.spec import get, long_to_compile, plane_count

#: Tokens of whole tiles that are read in the time that one of the rest takes: their instructions, about.
REST_COST = tl.constexpr(8)


@triton.jit
def split_kernel(
    query,  # [B, Q, D]
    partial,  # float32 [B, Q, splits + 1, D]
    logsum,  # float32 [B, Q, splits + 1], base 2; -inf: no tokens, `partial` is then not written
    lengths,  # int32 [B]
    counts,  # int32 [B] x 2: packed tokens of the keys, of the values
    window,  # tokens that the query sees, its own included
    heads,  # int32 [heads of this launch] x 3: the kv head, its place among those of the keys' and values' storage
    keys,
    values,  # tuples of pointers, see `number.py`
    key_strides,
    value_strides,
    slots,  # of the keys' ring, of the values'
    rope,  # coarse, fine, fine_half, offset
    scale,  # softmax's, times log2(e)
    SK: tl.constexpr,  # SideSpec
    SV: tl.constexpr,
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    HEADS: tl.constexpr,  # kv heads
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # that, as a power of two
    SINKS: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
    E: tl.constexpr,  # columns of a plane
    KD: tl.constexpr,  # types that keys and values are multiplied in
    VD: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 products
    TAIL: tl.constexpr,  # tokens of a tile of the rest
    STAGES: tl.constexpr,
):
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    programs = tl.num_programs(0)
    length = tl.load(lengths + row)
    key_count, value_count = tl.load(counts[0] + row), tl.load(counts[1] + row)
    if heads is None:
        head, key_place, value_place = place, place, place
    else:
        head, key_place = tl.load(heads[0] + place), tl.load(heads[1] + place)
        value_place = tl.load(heads[2] + place)
    k = at_stored_head(keys, key_strides, SK, row, head, key_place)
    v = at_stored_head(values, value_strides, SV, row, head, value_place)
    D: tl.constexpr = get(SK, "dim")
    first_query = row * (HEADS * GROUP) + head * GROUP
    q = query + first_query.to(tl.int64) * D
    start = 0 if rope[3] is None else tl.load(rope[3] + row)
    tiles = tl.minimum(key_count, value_count) // N
    low = tl.maximum(length - window, 0)
    begin = tl.minimum(tl.cdiv(tl.maximum(low - SINKS, 0), N), tiles)
    place = first_query * programs + split
    held = tl.maximum(tl.minimum(length, SINKS + begin * N) - low, 0)
    after = tl.maximum(SINKS + tiles * N, low)
    rest = held + tl.maximum(length - after, 0)
    splits = programs - _rest_programs(programs, (tiles - begin) * N, tl.cdiv(rest, TAIL), TAIL)
    if split < splits:
        each = tl.cdiv(tiles - begin, splits)
        first = tl.minimum(begin + split * each, tiles)
        last = tl.minimum(first + each, tiles)
        attend_main(
            q, partial, logsum, place, programs, k, v, first, last, rope, start + SINKS, scale,
            SK, SV, STYLE, WIDTH, GROUP, M, N, E, KD, VD, PRECISION, STAGES,
        )  # fmt: skip
    else:
        each = tl.cdiv(tl.cdiv(rest, TAIL), programs - splits) * TAIL
        first = (split - splits) * each
        last = tl.minimum(first + each, rest)
        (_called_rest if long_to_compile(SK, SV) else _attend_rest)(
            q, partial, logsum, place, programs, k, v, first, last, low, held, after, key_count, value_count,
            slots, rope, start, scale, SK, SV, STYLE, WIDTH, GROUP, M, SINKS, E, PRECISION, TAIL,
        )  # fmt: skip


@triton.jit
def _rest_programs(programs, whole, tiles, N: tl.constexpr):
    """How many of `programs` read the rest, of `tiles` of N tokens, while the others read `whole` tokens: so many that
    all take as long; at least one of either kind where there is something to read."""
    cost = (tiles * (N * REST_COST)).to(tl.float32)
    share = (programs * (cost / tl.maximum(cost + whole, 1.0)) + 0.5).to(tl.int32)
    most = tl.minimum(tl.maximum(tiles, 1), programs - (whole > 0))
    each = tl.cdiv(tiles, tl.minimum(tl.maximum(share, 1), most))
    return tl.cdiv(tiles, tl.maximum(each, 1))


@triton.jit
def _attend_rest(
    q, partial, logsum, place, programs, k, v, first, last, low, held, after, key_count, value_count, slots, rope,
    start, scale, SK: tl.constexpr, SV: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, SINKS: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Of the `held` tokens from `low` on and those from `after` on the numbers [first, last), in float32, both sides
    read where they are held."""
    D: tl.constexpr = get(SK, "dim")
    P: tl.constexpr = plane_count(SK, E)
    member, column, within = tl.arange(0, M), tl.arange(0, E), tl.arange(0, N)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    plane = tl.arange(0, P)[:, None, None]
    acc = tl.zeros([P, M, E], tl.float32)
    for at in tl.range(first, last, N, num_stages=1):
        index = at + within
        token = tl.where(index < held, low + index, index - held + after)
        seen = index < last
        here, alive = token[:, None], seen[:, None]
        scores = tl.zeros([M, N], tl.float32)
        if STYLE == "none":
            for j in tl.range(0, P, num_stages=1):
                channel = (j * E + column)[None, :]
                mine = (member[:, None] < GROUP) & (channel < D)
                a = tl.load(q + member[:, None] * D + channel, mask=mine, other=0.0).to(tl.float32)
                x = any_number(k, SK, SINKS, slots[0], key_count, here, channel, alive & (channel < D))
                scores = tl.dot(a, tl.trans(x), scores, input_precision=PRECISION)
        else:
            for j in tl.range(0, P // 2, num_stages=1):
                pair = j * E + column
                c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
                real = (pair < D // 2)[None, :]
                cos, sin = position_turn(rope, start + token, pair, WIDTH, D)
                x1 = any_number(k, SK, SINKS, slots[0], key_count, here, c1[None, :], alive & real)
                x2 = any_number(k, SK, SINKS, slots[0], key_count, here, c2[None, :], alive & real)
                mine = (member[:, None] < GROUP) & real
                a1 = tl.load(q + member[:, None] * D + c1[None, :], mask=mine, other=0.0).to(tl.float32)
                a2 = tl.load(q + member[:, None] * D + c2[None, :], mask=mine, other=0.0).to(tl.float32)
                scores = tl.dot(a1, tl.trans(x1 * cos - x2 * sin), scores, input_precision=PRECISION)
                scores = tl.dot(a2, tl.trans(x2 * cos + x1 * sin), scores, input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(top - peak)
        total = total * shrink + tl.sum(weights, axis=1)
        acc *= shrink[None, :, None]
        for j in tl.range(0, P, num_stages=1):
            channel = (j * E + column)[None, :]
            x = any_number(v, SV, SINKS, slots[1], value_count, here, channel, alive & (channel < D))
            acc += tl.where(plane == j, tl.dot(weights, x, input_precision=PRECISION)[None, :, :], 0.0)
        top = peak
    out = output(partial, place, programs, D, M)
    if last > first:
        channel = plane * E + column[None, None, :]
        mine = (member[None, :, None] < GROUP) & (channel < D)
        tl.store(out[None, :, None] + channel, acc / total[None, :, None], mask=mine)
    tl.store(output(logsum, place, programs, 1, M), top + tl.log2(total), mask=member < GROUP)


#: `_attend_rest` as a function that is called: a pass of the compiler takes as long as the square of what is in one
#: function.
_called_rest = triton.jit(_attend_rest.fn, noinline=True)


@triton.jit
def combine_kernel(partial, logsum, out, count, D: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr):
    """out [B * Q, D] = sum_s 2^(L_s - L) partial_s with L = log2 sum_s 2^L_s; one program per query head, all splits at
    once. Zeros where no split has tokens."""
    place = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, S), tl.arange(0, WIDE)
    sums = tl.load(logsum + place * count + split, mask=split < count, other=float("-inf"))
    top = tl.max(sums, axis=0)
    weights = tl.where(sums == float("-inf"), 0.0, tl.exp2(sums - top))
    total = tl.sum(weights, axis=0)
    real = (weights > 0)[:, None] & (channel < D)[None, :]
    x = tl.load(partial + (place * count + split)[:, None] * D + channel[None, :], mask=real, other=0.0)
    mean = tl.sum(x * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * D + channel, mean.to(out.dtype.element_ty), mask=channel < D)
