"""Sums p x over tokens, and their projection by W_v, once at the end: sum p (x W + b) = (sum p x) W + b.

`scores.py` leaves the scores, `read.py` reads the latents, `launch.py` passes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.rematerialize.read import field_numbers, load_words, token_count, token_lines
from kvq_kernels.span_softmax import merged_sums, softmax_step, tiles_of_split


@triton.jit
def sum_kernel(
    scores,  # float32 [B, Q, SPAN], of `score_kernel`
    partial,  # float32 [B, Q, splits, RANK]
    before,  # float32 [B, Q, splits]: log-sum-exp (base 2) of the tokens summed in `partial` so far
    after,  # the same with this span's tokens
    lengths,  # int32 [B]
    counts,
    side,
    strides,
    ring_size,
    base,
    S: tl.constexpr,  # Source
    FIRST_SPAN: tl.constexpr,  # `partial` is empty
    RANK: tl.constexpr,
    HEADS: tl.constexpr,  # query heads
    Q: tl.constexpr,  # HEADS, padded to a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
    R: tl.constexpr,  # words of a program
    F: tl.constexpr,  # fields of a program
    T: tl.constexpr,  # type of the products p x
    PRECISION: tl.constexpr,
):
    """Add a split of the span's tokens to `partial`, for all query heads and F fields of R words."""
    part, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    W: tl.constexpr = S.words
    PARTS: tl.constexpr = S.fields // F
    start, first_field = (part // PARTS) * R, (part % PARTS) * F
    length, count = tl.load(lengths + row), tl.load(counts + row)
    total = token_count(length, count, S)
    span_tokens = tl.minimum(tl.maximum(total - base, 0), SPAN)
    first, last = tiles_of_split(span_tokens, split, splits, N)

    query = tl.arange(0, Q)
    query_mask = query < HEADS
    queries = row.to(tl.int64) * HEADS + query
    query_split = queries * splits + split
    word = start + tl.arange(0, R)
    m_i = tl.full([Q], float("-inf"), tl.float32)
    if not FIRST_SPAN:
        m_i = tl.load(before + query_split, mask=query_mask, other=float("-inf"))
    l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    acc = ()
    for i in tl.static_range(F):
        channel = (first_field + i) * W + word
        mask = query_mask[:, None] & ((word < W) & (channel < S.width))[None, :]
        if FIRST_SPAN:
            acc = acc + (tl.zeros([Q, R], tl.float32),)
        else:
            acc = acc + (tl.load(partial + query_split[:, None] * RANK + channel[None, :], mask=mask, other=0.0),)
    for tile in tl.range(first, last):
        begin = base + tile * N
        within = tile * N + tl.arange(0, N)
        p, alpha, m_i, l_i = softmax_step(scores, queries, query_mask, within, span_tokens, m_i, l_i, SPAN)
        index = tl.minimum(base + within, total - 1)
        lines = token_lines(side, strides, row, index, count, ring_size, S)
        words = load_words(lines, word, S)
        new = ()
        for i in tl.static_range(F):
            x = field_numbers(words, lines, side, strides, row, begin, index, start, first_field + i, S, N, R, T)
            x = tl.dot(p.to(T), x, acc[i] * alpha[:, None], input_precision=PRECISION)
            new = new + (x,)
        acc = new
    scale = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    for i in tl.static_range(F):
        channel = (first_field + i) * W + word
        mask = query_mask[:, None] & ((word < W) & (channel < S.width))[None, :]
        tl.store(partial + query_split[:, None] * RANK + channel[None, :], acc[i] * scale[:, None], mask=mask)
    tl.store(after + query_split, m_i + tl.log2(l_i), mask=query_mask & (part == 0))


@triton.jit
def project_kernel(
    partial,  # float32 [B, Q, splits, RANK], of `sum_kernel`
    logsum,  # float32 [B, Q, splits]
    weight,  # [RANK, H * D]
    weight_strides,
    bias,  # [H * D] or None
    out,  # [B, Q, D]
    splits,
    RANK: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two
    SPLITS: tl.constexpr,  # splits, padded to a power of two
    R: tl.constexpr,  # channels of x per step
    C: tl.constexpr,  # output channels of a program
    T: tl.constexpr,  # type of the product
    PRECISION: tl.constexpr,
):
    """Merge splits and project: out = (sum_s 2^(L_s - L) partial_s) W + b, L = log2 sum_s 2^L_s; 0 without tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * C + tl.arange(0, C)
    member, split = tl.arange(0, M), tl.arange(0, SPLITS)
    queries = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
    query_mask = member < GROUP
    mask = query_mask[:, None] & (split < splits)[None, :]
    query_split = queries[:, None] * splits + split[None, :]
    logsums = tl.load(logsum + query_split, mask=mask, other=float("-inf"))
    m_i = tl.max(logsums, axis=1)
    m_finite = tl.where(m_i == float("-inf"), 0.0, m_i)
    weights = tl.exp2(logsums - m_finite[:, None])
    l_i = tl.sum(weights, axis=1)
    weights = weights / tl.where(l_i > 0, l_i, 1.0)[:, None]
    projected = tl.zeros([M, C], tl.float32)
    columns = weight + (head * D + channel)[None, :] * weight_strides[1]
    for start in tl.range(0, RANK, R):
        rank = start + tl.arange(0, R)
        inside = rank < RANK
        merged = merged_sums(partial, query_split, weights, mask, rank, inside, RANK)
        w = tl.load(
            columns + rank[:, None] * weight_strides[0], mask=inside[:, None] & (channel < D)[None, :], other=0.0
        )
        projected = tl.dot(merged.to(T), w.to(T), projected, input_precision=PRECISION)
    if bias is not None:
        projected += tl.load(bias + head * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
    projected = tl.where((l_i > 0)[:, None], projected, 0.0)
    tl.store(
        out + queries[:, None] * D + channel[None, :],
        projected.to(out.dtype.element_ty),
        mask=query_mask[:, None] & (channel < D)[None, :],
    )
