"""Scores of packed keys: S z' + mean of a tile of tokens, RoPE, product with the queries."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.key_scores import key_pairs, store_scores
from kvq_kernels.transform_attention.read import load_step, step_components


@triton.jit
def score_kernel(
    query,  # [B, Q, D]
    scores,  # float32 [B, Q, SPAN], base 2; -inf for tokens outside of the window; not written beyond the last token
    lengths,  # int32 [B]
    counts,  # int32 [B], packed tokens
    codes,  # uint8 [B, 1, T, LINE]
    row_stride,  # of codes
    centroids,
    synthesis,
    mean,
    groups,
    steps,
    rope,  # coarse, fine, offset, or None each
    base,  # packed token that the span begins with
    window,  # number of newest tokens to attend to; 0: all
    scale,  # softmax's, times log2(e)
    SINKS: tl.constexpr,
    LINE: tl.constexpr,  # codes of a token
    HEADS: tl.constexpr,  # kv heads of a group
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    D: tl.constexpr,
    P: tl.constexpr,  # pairs of channels, padded
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile, at most 128
    R: tl.constexpr,  # components of a step
    T: tl.constexpr,  # type of the products S z
    PRECISION: tl.constexpr,  # of float32 products
):
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, count = tl.load(lengths + row), tl.load(counts + row)
    begin = base + tile * N
    if begin >= count:
        return
    index = tl.minimum(begin + tl.arange(0, N), count - 1)
    lines = codes + row.to(tl.int64) * row_stride + index.to(tl.int64) * LINE
    c1, c2, pair_mask = key_pairs(P, STYLE, WIDTH, D)
    k1 = tl.zeros([N, P], tl.float32) + tl.load(mean + head * D + c1, mask=pair_mask, other=0.0)[None, :]
    k2 = tl.zeros([N, P], tl.float32) + tl.load(mean + head * D + c2, mask=pair_mask, other=0.0)[None, :]
    group = groups + (head // HEADS) * 4
    components = tl.load(group + 3)
    weight = synthesis + tl.load(group + 2) + (head % HEADS) * D * components
    for step in tl.range(tl.load(group), tl.load(group + 1)):
        _, code, many, size, centroid_row, first = load_step(steps, step)
        z = step_components(lines, centroids, code, many, size, centroid_row, R, T)
        number = tl.arange(0, R)
        component = (first + number * size)[:, None]
        weight_mask = (number < many)[:, None] & pair_mask[None, :]
        w1 = tl.load(weight + c1[None, :] * components + component, mask=weight_mask, other=0.0).to(T)
        w2 = tl.load(weight + c2[None, :] * components + component, mask=weight_mask, other=0.0).to(T)
        k1 = tl.dot(z, w1, k1, input_precision=PRECISION)
        k2 = tl.dot(z, w2, k2, input_precision=PRECISION)
    store_scores(
        k1, k2, query, scores, length, SINKS + index, SINKS + begin, count - begin, rope, window, scale, True, STYLE,
        WIDTH, D, P, GROUP, M, SPAN, N, PRECISION,
    )  # fmt: skip
