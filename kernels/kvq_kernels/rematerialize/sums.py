"""Sums of p x over the tokens, which are multiplied by W_v once, at the end: sum p (x W + b) = (sum p x) W + b."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.spec import get
from kvq_kernels.rematerialize.read import field_numbers, load_words, token_count, token_lines


@triton.jit
def sum_kernel(
    scores,  # float32 [B, Q, SPAN], of `score_kernel`
    partial,  # float32 [B, Q, splits, RANK]
    before,  # float32 [B, Q, splits]: log-sum-exp (base 2) of what is in `partial`
    after,  # the same when this span's tokens are in it
    lengths,  # int32 [B]
    counts,
    held,
    strides,
    slots,
    base,
    S: tl.constexpr,  # Source
    BEGINS: tl.constexpr,  # nothing is in `partial` yet
    RANK: tl.constexpr,
    HEADS: tl.constexpr,  # query heads
    Q: tl.constexpr,  # these, as a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
    R: tl.constexpr,  # words of a program
    F: tl.constexpr,  # fields of a program
    T: tl.constexpr,  # type of the products p x
    PRECISION: tl.constexpr,
):
    """A program takes in a split of the span's tokens, for all query heads and for F fields of R words."""
    part, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    W: tl.constexpr = get(S, "words")
    PARTS: tl.constexpr = get(S, "fields") // F
    start, first_field = (part // PARTS) * R, (part % PARTS) * F
    length, count = tl.load(lengths + row), tl.load(counts + row)
    total = token_count(length, count, S)
    here = tl.minimum(tl.maximum(total - base, 0), SPAN)
    tiles = tl.cdiv(here, N)
    each = tl.cdiv(tiles, splits)
    first = tl.minimum(split * each, tiles)
    last = tl.minimum(first + each, tiles)

    query = tl.arange(0, Q)
    mine = query < HEADS
    queries = row.to(tl.int64) * HEADS + query
    place = queries * splits + split
    word = start + tl.arange(0, R)
    top = tl.full([Q], float("-inf"), tl.float32)
    if not BEGINS:
        top = tl.load(before + place, mask=mine, other=float("-inf"))
    sums = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = ()
    for i in tl.static_range(F):
        channel = (first_field + i) * W + word
        there = mine[:, None] & ((word < W) & (channel < get(S, "width")))[None, :]
        if BEGINS:
            acc = acc + (tl.zeros([Q, R], tl.float32),)
        else:
            acc = acc + (tl.load(partial + place[:, None] * RANK + channel[None, :], mask=there, other=0.0),)
    for tile in tl.range(first, last):
        begin = base + tile * N
        within = tile * N + tl.arange(0, N)
        seen = mine[:, None] & (within < here)[None, :]
        s = tl.load(scores + queries[:, None] * SPAN + within[None, :], mask=seen, other=float("-inf"))
        peak = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        sums = sums * shrink + tl.sum(weights, axis=1)
        index = tl.minimum(base + within, total - 1)
        lines = token_lines(held, strides, row, index, count, slots, S)
        words = load_words(lines, word, S)
        new = ()
        for i in tl.static_range(F):
            x = field_numbers(words, lines, held, strides, row, begin, index, start, first_field + i, S, N, R, T)
            x = tl.dot(weights.to(T), x, acc[i] * shrink[:, None], input_precision=PRECISION)
            new = new + (x,)
        acc = new
        top = peak
    share = 1.0 / tl.where(sums > 0, sums, 1.0)
    for i in tl.static_range(F):
        channel = (first_field + i) * W + word
        there = mine[:, None] & ((word < W) & (channel < get(S, "width")))[None, :]
        tl.store(partial + place[:, None] * RANK + channel[None, :], acc[i] * share[:, None], mask=there)
    tl.store(after + place, top + tl.log2(sums), mask=mine & (part == 0))


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
    M: tl.constexpr,  # that, as a power of two
    SPLITS: tl.constexpr,  # as a power of two
    R: tl.constexpr,  # channels of x of a step
    C: tl.constexpr,  # channels of the output of a program
    T: tl.constexpr,  # type of the product
    PRECISION: tl.constexpr,
):
    """out = (sum_s 2^(L_s - L) partial_s) W + b with L = log2 sum_s 2^L_s; zeros for rows without tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * C + tl.arange(0, C)
    member, split = tl.arange(0, M), tl.arange(0, SPLITS)
    queries = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
    mine = member < GROUP
    there = mine[:, None] & (split < splits)[None, :]
    place = queries[:, None] * splits + split[None, :]
    sums = tl.load(logsum + place, mask=there, other=float("-inf"))
    top = tl.max(sums, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(sums - safe[:, None])
    total = tl.sum(weights, axis=1)
    weights = weights / tl.where(total > 0, total, 1.0)[:, None]
    made = tl.zeros([M, C], tl.float32)
    columns = weight + (head * D + channel)[None, :] * weight_strides[1]
    for start in tl.range(0, RANK, R):
        rank = start + tl.arange(0, R)
        inside = rank < RANK
        x = tl.load(
            partial + place[:, :, None] * RANK + rank[None, None, :],
            mask=there[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        mean = tl.sum(x * weights[:, :, None], axis=1)
        w = tl.load(
            columns + rank[:, None] * weight_strides[0], mask=inside[:, None] & (channel < D)[None, :], other=0.0
        )
        made = tl.dot(mean.to(T), w.to(T), made, input_precision=PRECISION)
    if bias is not None:
        made += tl.load(bias + head * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
    made = tl.where((total > 0)[:, None], made, 0.0)
    tl.store(
        out + queries[:, None] * D + channel[None, :],
        made.to(out.dtype.element_ty),
        mask=mine[:, None] & (channel < D)[None, :],
    )
