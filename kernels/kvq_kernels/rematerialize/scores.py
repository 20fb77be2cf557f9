"""Scores of rematerialized keys: x W of a tile of latents, norm, RoPE, product with the queries.

`read.py` reads the latents, `sums.py` does the values, `launch.py` passes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.key_scores import key_pairs, store_scores
from kvq_kernels.rematerialize.read import (
    field_numbers,
    load_words,
    row_pointer,
    token_count,
    token_index,
    token_lines,
)


@triton.jit
def score_kernel(
    query,  # [B, Q, D]
    scores,  # float32 [B, Q, SPAN], base 2; -inf for tokens outside of the window; not written beyond the last token
    lengths,  # int32 [B]
    counts,  # int32 [B], packed tokens
    side,  # tuple of pointers, see `read.py`
    strides,  # between rows: of codes, of scale and zero, of first, of sinks, of ring
    weight,  # [R, H * D]
    weight_strides,
    bias,  # [H * D] or None
    norm,  # float32 [H, D] or None
    epsilon,
    rope,  # coarse, fine, offset, or None each
    ring_size,  # tokens that the ring buffer holds
    base,  # index in the source of the span's first token
    window,  # number of newest tokens to attend to; 0: all
    scale,  # softmax's, times log2(e)
    extent,  # words, fields of a line: run-time values, since loops with constant bounds are unrolled until they spill
    S: tl.constexpr,  # Source
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    NORM: tl.constexpr,  # "none", "rms", "layer"
    D: tl.constexpr,
    P: tl.constexpr,  # pairs of channels, padded
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two
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
    index = tl.minimum(begin + tl.arange(0, N), total - 1)
    token = token_index(index, length, count, S)
    lines = token_lines(side, strides, row, index, count, ring_size, S)

    c1, c2, pair_mask = key_pairs(P, STYLE, WIDTH, D)
    head_weight = weight + head * D * weight_strides[1]
    k1, k2 = _products(
        lines,
        side,
        strides,
        row,
        begin,
        index,
        head_weight,
        weight_strides,
        c1,
        c2,
        pair_mask,
        extent,
        S,
        N,
        R,
        P,
        T,
        PRECISION,
    )
    if bias is not None:
        k1 += tl.load(bias + head * D + c1, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        k2 += tl.load(bias + head * D + c2, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
    if NORM != "none":
        k1, k2 = _normed(k1, k2, norm + head * D, epsilon, c1, c2, pair_mask, NORM, D)

    store_scores(
        k1, k2, query, scores, length, token, S.sinks + begin, total - begin, rope, window, scale,
        S.kind != "exact", STYLE, WIDTH, D, P, GROUP, M, SPAN, N, PRECISION,
    )  # fmt: skip


@triton.jit
def _products(
    lines, side, strides, row, begin, index, weight, weight_strides, c1, c2, pair_mask, extent, S: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(k1, k2) float32 [N, P]: x W of the tile's tokens, columns c1 and c2 [P] of W."""
    W: tl.constexpr = S.words
    k1, k2 = tl.zeros([N, P], tl.float32), tl.zeros([N, P], tl.float32)
    first, second = weight + c1 * weight_strides[1], weight + c2 * weight_strides[1]
    if S.first:
        first_channel = tl.load(row_pointer(side[3], row, strides[2]) + index).to(tl.float32)[:, None]
        k1 += first_channel * tl.load(first, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        k2 += first_channel * tl.load(second, mask=pair_mask, other=0.0).to(tl.float32)[None, :]
        first += weight_strides[0]
        second += weight_strides[0]
    for start in tl.range(0, extent[0], R):
        word = start + tl.arange(0, R)
        words = load_words(lines, word, S)
        for field in tl.range(0, extent[1]):
            channel = field * W + word
            weight_mask = ((word < W) & (channel < S.width))[:, None] & pair_mask[None, :]
            x = field_numbers(words, lines, side, strides, row, begin, index, start, field, S, N, R, T)
            w1 = tl.load(first[None, :] + channel[:, None] * weight_strides[0], mask=weight_mask, other=0.0).to(T)
            w2 = tl.load(second[None, :] + channel[:, None] * weight_strides[0], mask=weight_mask, other=0.0).to(T)
            k1 = tl.dot(x, w1, k1, input_precision=PRECISION)
            k2 = tl.dot(x, w2, k2, input_precision=PRECISION)
    return k1, k2


@triton.jit
def _normed(k1, k2, weight, epsilon, c1, c2, pair_mask, NORM: tl.constexpr, D: tl.constexpr):
    """(k1, k2) [N, P] after the keys' norm, see `Norm`."""
    if NORM == "layer":
        mean = (tl.sum(k1, axis=1) + tl.sum(k2, axis=1)) / D
        k1 = tl.where(pair_mask[None, :], k1 - mean[:, None], 0.0)
        k2 = tl.where(pair_mask[None, :], k2 - mean[:, None], 0.0)
    square = (tl.sum(k1 * k1, axis=1) + tl.sum(k2 * k2, axis=1)) / D
    inverse_rms = (1.0 / tl.sqrt(square + epsilon))[:, None]
    k1 *= inverse_rms * tl.load(weight + c1, mask=pair_mask, other=0.0)[None, :]
    k2 *= inverse_rms * tl.load(weight + c2, mask=pair_mask, other=0.0)[None, :]
    return k1, k2
