"""Scores of a span of tokens: keys are made of the latents a tile at a time, turned, multiplied with the queries."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.rope import pair_channels, position_turn, turn
from kvq_kernels.decode_attention.spec import get
from kvq_kernels.rematerialize.read import (
    field_numbers,
    load_words,
    row_start,
    token_count,
    token_lines,
    token_number,
)


@triton.jit
def score_kernel(
    query,  # [B, Q, D]
    scores,  # float32 [B, Q, SPAN], base 2; of tokens that a query does not see -inf; beyond the last: not written
    lengths,  # int32 [B]
    counts,  # int32 [B], packed tokens
    held,  # pointers, see `token_lines`
    strides,  # between rows: of codes, of scale and zero, of first, of sinks, of ring
    weight,  # [R, H * D]
    weight_strides,
    bias,  # [H * D] or None
    norm,  # float32 [H, D] or None
    epsilon,
    rope,  # coarse, fine, offset, or None each
    slots,  # of the ring
    base,  # first token of the span, as the source counts
    window,  # newest tokens that are seen; 0: all
    scale,  # softmax's, times log2(e)
    extent,  # words, fields of a line: as numbers of a launch, since loops of constants are unrolled until they spill
    S: tl.constexpr,  # Source
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    NORM: tl.constexpr,  # "none", "rms", "layer"
    D: tl.constexpr,
    P: tl.constexpr,  # pairs of channels, padded
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # that, as a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile, at most 128: the fine table of RoPE
    R: tl.constexpr,  # words of a step
    T: tl.constexpr,  # type of the products x W
    PRECISION: tl.constexpr,  # of float32 products
):
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, count = tl.load(lengths + row), tl.load(counts + row)
    begin, total = base + tile * N, token_count(length, count, S)
    if begin >= total:
        return
    within = tl.arange(0, N)
    index = tl.minimum(begin + within, total - 1)
    token = token_number(index, length, count, S)
    lines = token_lines(held, strides, row, index, count, slots, S)

    pair, member = tl.arange(0, P), tl.arange(0, M)
    PAIRS: tl.constexpr = "half" if STYLE == "none" else STYLE
    c1, c2 = pair_channels(pair, PAIRS, WIDTH, D)
    real = pair < D // 2
    own = weight + head * D * weight_strides[1]
    k1, k2 = _products(
        lines, held, strides, row, begin, index, own, weight_strides, c1, c2, real, extent, S, N, R, P, T, PRECISION
    )
    if bias is not None:
        k1 += tl.load(bias + head * D + c1, mask=real, other=0.0).to(tl.float32)[None, :]
        k2 += tl.load(bias + head * D + c2, mask=real, other=0.0).to(tl.float32)[None, :]
    if NORM != "none":
        k1, k2 = _normed(k1, k2, norm + head * D, epsilon, c1, c2, real, NORM, D)

    queries = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
    mine = (member < GROUP)[:, None] & real[None, :]
    q1 = tl.load(query + queries[:, None] * D + c1[None, :], mask=mine, other=0.0).to(tl.float32)
    q2 = tl.load(query + queries[:, None] * D + c2[None, :], mask=mine, other=0.0).to(tl.float32)
    if STYLE != "none":
        start = 0 if rope[2] is None else tl.load(rope[2] + row)
        own_pair = tl.minimum(pair, D // 2 - 1)  # there are 16 pairs of a smaller head, too
        if get(S, "kind") == "exact":
            cos, sin = position_turn(rope, start + token, own_pair, WIDTH, D)
        else:
            # R(begin + i) k = R(begin) R(i) k: the first turn is taken back from the queries.
            position = start + get(S, "sinks") + begin + tl.zeros([1], tl.int32)
            cos, sin = position_turn(rope, position, own_pair, WIDTH, D)
            q1, q2 = q1 * cos + q2 * sin, q2 * cos - q1 * sin
            cos, sin = turn(rope[1], within[:, None], own_pair[None, :], WIDTH, D)
        k1, k2 = k1 * cos - k2 * sin, k2 * cos + k1 * sin
    found = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
    found = tl.dot(k2, tl.trans(q2), found, input_precision=PRECISION) * scale
    if window > 0:
        found = tl.where((token >= length - window)[:, None], found, float("-inf"))
    place = scores + queries[None, :] * SPAN + (tile * N + within)[:, None]
    tl.store(place, found, mask=(begin + within < total)[:, None] & (member < GROUP)[None, :])


@triton.jit
def _products(
    lines, held, strides, row, begin, index, weight, weight_strides, c1, c2, real, extent, S: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x W of the tile's tokens, columns c1 and c2 [P] of W: twice float32 [N, P]."""
    W: tl.constexpr = get(S, "words")
    k1, k2 = tl.zeros([N, P], tl.float32), tl.zeros([N, P], tl.float32)
    first, second = weight + c1 * weight_strides[1], weight + c2 * weight_strides[1]
    if get(S, "first"):
        alone = tl.load(row_start(held[3], row, strides[2]) + index).to(tl.float32)[:, None]
        k1 += alone * tl.load(first, mask=real, other=0.0).to(tl.float32)[None, :]
        k2 += alone * tl.load(second, mask=real, other=0.0).to(tl.float32)[None, :]
        first += weight_strides[0]
        second += weight_strides[0]
    for start in tl.range(0, extent[0], R):
        word = start + tl.arange(0, R)
        words = load_words(lines, word, S)
        for field in tl.range(0, extent[1]):
            channel = field * W + word
            there = ((word < W) & (channel < get(S, "width")))[:, None] & real[None, :]
            x = field_numbers(words, lines, held, strides, row, begin, index, start, field, S, N, R, T)
            w1 = tl.load(first[None, :] + channel[:, None] * weight_strides[0], mask=there, other=0.0).to(T)
            w2 = tl.load(second[None, :] + channel[:, None] * weight_strides[0], mask=there, other=0.0).to(T)
            k1 = tl.dot(x, w1, k1, input_precision=PRECISION)
            k2 = tl.dot(x, w2, k2, input_precision=PRECISION)
    return k1, k2


@triton.jit
def _normed(k1, k2, weight, epsilon, c1, c2, real, NORM: tl.constexpr, D: tl.constexpr):
    """Keys [N, P] x 2 after their norm; see `Norm`."""
    if NORM == "layer":
        mean = (tl.sum(k1, axis=1) + tl.sum(k2, axis=1)) / D
        k1 = tl.where(real[None, :], k1 - mean[:, None], 0.0)
        k2 = tl.where(real[None, :], k2 - mean[:, None], 0.0)
    square = (tl.sum(k1 * k1, axis=1) + tl.sum(k2 * k2, axis=1)) / D
    gain = (1.0 / tl.sqrt(square + epsilon))[:, None]
    k1 *= gain * tl.load(weight + c1, mask=real, other=0.0)[None, :]
    k2 *= gain * tl.load(weight + c2, mask=real, other=0.0)[None, :]
    return k1, k2
