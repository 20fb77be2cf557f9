"""Online softmax over the scores of a span, and the merge of its splits, in kernels; `spans.py` has their launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_of_split(span_tokens, split, splits, N: tl.constexpr):
    """(first, end) of the tiles of N tokens that a split of a span has."""
    tiles = tl.cdiv(span_tokens, N)
    each = tl.cdiv(tiles, splits)
    first = tl.minimum(split * each, tiles)
    return first, tl.minimum(first + each, tiles)


@triton.jit
def softmax_step(scores, queries, query_mask, within, span_tokens, m_i, l_i, SPAN: tl.constexpr):
    """(p [Q, N], alpha, m_i, l_i [Q]) of online softmax over the tokens `within` [N] of the span."""
    valid = query_mask[:, None] & (within < span_tokens)[None, :]
    qk = tl.load(scores + queries[:, None] * SPAN + within[None, :], mask=valid, other=float("-inf"))
    m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
    m_finite = tl.where(m_ij == float("-inf"), 0.0, m_ij)
    p = tl.exp2(qk - m_finite[:, None])
    alpha = tl.exp2(m_i - m_finite)
    return p, alpha, m_ij, l_i * alpha + tl.sum(p, axis=1)


@triton.jit
def merged_sums(partial, query_split, weights, mask, number, inside, RANK: tl.constexpr):
    """[M, R]: numbers `number` [R] of the partial sums, merged over splits. query_split, weights, mask: [M, SPLITS]."""
    x = tl.load(
        partial + query_split[:, :, None] * RANK + number[None, None, :],
        mask=mask[:, :, None] & inside[None, None, :],
        other=0.0,
    )
    return tl.sum(x * weights[:, :, None], axis=1)
