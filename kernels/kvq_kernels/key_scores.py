"""Scores of a tile of keys before RoPE, for kernels that compute keys in registers: rotation, product with the queries,
sliding window."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.rope import load_cos_sin, pair_channels, position_cos_sin, unrotate


@triton.jit
def key_pairs(P: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """(channels, channels, mask) [P]: both channels of each pair of a key, as `store_scores` takes them."""
    pair = tl.arange(0, P)
    PAIRS: tl.constexpr = "half" if STYLE == "none" else STYLE
    c1, c2 = pair_channels(pair, PAIRS, WIDTH, D)
    return c1, c2, pair < D // 2


@triton.jit
def store_scores(
    k1,  # float32 [N, P]: channels c1, c2 of `key_pairs` of the keys, before RoPE
    k2,
    query,  # [B, Q, D]
    scores,  # float32 [B, Q, SPAN]
    length,  # tokens of the row
    token,  # [N]: which tokens of the row the keys are
    begin,  # the first of them, where they are consecutive
    tokens,  # how many of the N there are
    rope,  # coarse, fine, offset, or None each
    window,  # number of newest tokens to attend to; 0: all
    scale,  # softmax's, times log2(e)
    CONSECUTIVE: tl.constexpr,
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    D: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # at most 128: the fine table of RoPE
    PRECISION: tl.constexpr,  # of float32 products
):
    """Rotate keys, multiply them by the queries, and store the scores (base 2), -inf outside of the window.

    The grid is (tiles of N tokens of the span, kv heads, rows).
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    within, member, pair = tl.arange(0, N), tl.arange(0, M), tl.arange(0, P)
    c1, c2, pair_mask = key_pairs(P, STYLE, WIDTH, D)
    queries = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
    query_mask = (member < GROUP)[:, None] & pair_mask[None, :]
    q1 = tl.load(query + queries[:, None] * D + c1[None, :], mask=query_mask, other=0.0).to(tl.float32)
    q2 = tl.load(query + queries[:, None] * D + c2[None, :], mask=query_mask, other=0.0).to(tl.float32)
    if STYLE != "none":
        start = 0 if rope[2] is None else tl.load(rope[2] + row)
        pair_index = tl.minimum(pair, D // 2 - 1)  # P may exceed the pairs of a head
        if CONSECUTIVE:
            # R(begin + i) k = R(begin) R(i) k: the first rotation is undone on the queries.
            position = start + begin + tl.zeros([1], tl.int32)
            cos, sin = position_cos_sin(rope, position, pair_index, WIDTH, D)
            q1, q2 = unrotate(q1, q2, cos, sin)
            cos, sin = load_cos_sin(rope[1], within[:, None], pair_index[None, :], WIDTH, D)
        else:
            cos, sin = position_cos_sin(rope, start + token, pair_index, WIDTH, D)
        k1, k2 = k1 * cos - k2 * sin, k2 * cos + k1 * sin
    qk = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
    qk = tl.dot(k2, tl.trans(q2), qk, input_precision=PRECISION) * scale
    if window > 0:
        qk = tl.where((token >= length - window)[:, None], qk, float("-inf"))
    pointers = scores + queries[None, :] * SPAN + (tile * N + within)[:, None]
    tl.store(pointers, qk, mask=(within < tokens)[:, None] & (member < GROUP)[None, :])
