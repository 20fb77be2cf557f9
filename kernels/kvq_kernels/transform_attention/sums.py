"""Sums p z over packed tokens, attention to the exact ones, and the transform of the sums, once at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import at_head
from kvq_kernels.decode_attention.kernel import attend_tail
from kvq_kernels.decode_attention.spec import get
from kvq_kernels.span_softmax import merged_sums, softmax_step, tiles_of_split
from kvq_kernels.transform_attention.read import load_step, step_components


@triton.jit
def sum_kernel(
    scores,  # float32 [B, Q, SPAN], of `score_kernel`
    partial,  # float32 [B, Q, splits, COMPONENTS]
    before,  # float32 [B, Q, splits]: log-sum-exp (base 2) of the tokens summed in `partial` so far
    after,  # the same with this span's tokens
    counts,  # int32 [B], packed tokens
    codes,  # uint8 [B, 1, T, LINE]
    row_stride,  # of codes
    centroids,
    steps,
    base,  # packed token that the span begins with
    FIRST_SPAN: tl.constexpr,  # `partial` is empty
    LINE: tl.constexpr,  # codes of a token
    COMPONENTS: tl.constexpr,
    QUERIES: tl.constexpr,  # query heads of a group of kv heads
    HEADS: tl.constexpr,  # query heads
    Q: tl.constexpr,  # QUERIES, padded to a power of two
    SPAN: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
    R: tl.constexpr,  # components of a step
    T: tl.constexpr,  # type of the products p z
    PRECISION: tl.constexpr,
):
    """Add a split of the span's tokens to `partial`, for one step and the query heads of its group."""
    step, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    group, code, many, size, centroid_row, first_component = load_step(steps, step)
    count = tl.load(counts + row)
    span_tokens = tl.minimum(tl.maximum(count - base, 0), SPAN)
    first, last = tiles_of_split(span_tokens, split, splits, N)

    query, number = tl.arange(0, Q), tl.arange(0, R)
    query_mask = query < QUERIES
    queries = row.to(tl.int64) * HEADS + group * QUERIES + query
    query_split = queries * splits + split
    sums = partial + query_split[:, None] * COMPONENTS + (first_component + number * size)[None, :]
    mask = query_mask[:, None] & (number < many)[None, :]
    m_i = tl.full([Q], float("-inf"), tl.float32)
    acc = tl.zeros([Q, R], tl.float32)
    if not FIRST_SPAN:
        m_i = tl.load(before + query_split, mask=query_mask, other=float("-inf"))
        acc = tl.load(sums, mask=mask, other=0.0)
    l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    for tile in tl.range(first, last):
        within = tile * N + tl.arange(0, N)
        p, alpha, m_i, l_i = softmax_step(scores, queries, query_mask, within, span_tokens, m_i, l_i, SPAN)
        index = tl.minimum(base + within, count - 1)
        lines = codes + row.to(tl.int64) * row_stride + index.to(tl.int64) * LINE
        z = step_components(lines, centroids, code, many, size, centroid_row, R, T)
        acc = tl.dot(p.to(T), z, acc * alpha[:, None], input_precision=PRECISION)
    tl.store(sums, acc * (1.0 / tl.where(l_i > 0, l_i, 1.0))[:, None], mask=mask)
    # All steps of a group store the same numbers.
    tl.store(after + query_split, m_i + tl.log2(l_i), mask=query_mask)


@triton.jit
def exact_kernel(
    query,  # [B, Q, D]
    exact,  # float32 [B, Q, splits, D]
    logsum,  # float32 [B, Q, splits], base 2; -inf: no tokens, `exact` is then not written
    lengths,  # int32 [B]
    counts,  # int32 [B], packed tokens
    window,  # newest tokens that the query sees, its own included
    keys,
    values,  # tuples of pointers, see `decode_attention.dequantize`
    key_strides,
    value_strides,
    ring_size,  # tokens that the keys' and the values' ring buffers hold
    rope,  # coarse, fine, fine_half, offset
    scale,  # softmax's, times log2(e)
    SK: tl.constexpr,  # SideSpec
    SV: tl.constexpr,
    STYLE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    SINKS: tl.constexpr,
    E: tl.constexpr,  # channels of a column tile
    PRECISION: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
):
    """Attend to sinks and recent tokens: the tail of `decode_attention`, without packed tokens."""
    # The grid's axes are those of `decode_attention`: heads first.
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    length, count = tl.load(lengths + row), tl.load(counts + row)
    k, v = at_head(keys, key_strides, SK, row, head), at_head(values, value_strides, SV, row, head)
    D: tl.constexpr = get(SK, "dim")
    first_query = (row * tl.num_programs(0) + head) * GROUP
    q = query + first_query.to(tl.int64) * D
    start = 0 if rope[3] is None else tl.load(rope[3] + row)
    oldest = tl.maximum(length - window, 0)
    early = tl.maximum(tl.minimum(length, SINKS) - oldest, 0)
    late = tl.maximum(SINKS + count, oldest)
    tail = early + tl.maximum(length - late, 0)
    each = tl.cdiv(tl.cdiv(tail, N), splits) * N
    first = tl.minimum(split * each, tail)
    last = tl.minimum(first + each, tail)
    attend_tail(
        q, exact, logsum, first_query, k, v, first, last, oldest, early, late, count, count,
        ring_size, rope, start, scale, SK, SV, STYLE, WIDTH, GROUP, M, SINKS, E, PRECISION, N,
    )  # fmt: skip


@triton.jit
def project_kernel(
    partial,  # float32 [B, Q, splits, COMPONENTS], of `sum_kernel`
    logsum,  # float32 [B, Q, splits]
    exact,  # float32 [B, Q, exact_splits, D], of `exact_kernel`
    exact_logsum,  # float32 [B, Q, exact_splits]
    synthesis,
    mean,
    groups,
    out,  # [B, Q, D]
    splits,  # 0: nothing is packed
    exact_splits,
    COMPONENTS: tl.constexpr,
    HEADS: tl.constexpr,  # kv heads of a group
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded to a power of two
    SPLITS: tl.constexpr,  # splits, padded to a power of two
    EXACT: tl.constexpr,  # exact_splits, padded to a power of two
    R: tl.constexpr,  # components per step
    C: tl.constexpr,  # output channels of a program
    PRECISION: tl.constexpr,
):
    """Merge splits and transform: out = (sum_s w_s partial_s) S^T + (sum_s w_s) mean + sum_e w_e exact_e, where
    w = 2^(L_s - L), L = log2 sum 2^L_s; 0 without tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) * C + tl.arange(0, C)
    member, split, exact_split = tl.arange(0, M), tl.arange(0, SPLITS), tl.arange(0, EXACT)
    queries = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
    query_mask, channel_mask = (member < GROUP)[:, None], (channel < D)[None, :]
    mask, query_split = query_mask & (split < splits)[None, :], queries[:, None] * splits + split[None, :]
    exact_mask = query_mask & (exact_split < exact_splits)[None, :]
    exact_query = queries[:, None] * exact_splits + exact_split[None, :]
    logsums = tl.load(logsum + query_split, mask=mask, other=float("-inf"))
    exact_logsums = tl.load(exact_logsum + exact_query, mask=exact_mask, other=float("-inf"))
    m_i = tl.maximum(tl.max(logsums, axis=1), tl.max(exact_logsums, axis=1))
    m_finite = tl.where(m_i == float("-inf"), 0.0, m_i)
    weights, exact_weights = tl.exp2(logsums - m_finite[:, None]), tl.exp2(exact_logsums - m_finite[:, None])
    l_i = tl.sum(weights, axis=1) + tl.sum(exact_weights, axis=1)
    l_inverse = (1.0 / tl.where(l_i > 0, l_i, 1.0))[:, None]
    weights, exact_weights = weights * l_inverse, exact_weights * l_inverse

    group = groups + (head // HEADS) * 4
    components = tl.load(group + 3)
    weight = synthesis + tl.load(group + 2) + ((head % HEADS) * D + channel)[None, :] * components
    projected = tl.zeros([M, C], tl.float32)
    for start in tl.range(0, components, R):
        component = start + tl.arange(0, R)
        inside = component < components
        merged = merged_sums(partial, query_split, weights, mask, component, inside, COMPONENTS)
        w = tl.load(weight + component[:, None], mask=inside[:, None] & channel_mask, other=0.0).to(tl.float32)
        projected = tl.dot(merged, w, projected, input_precision=PRECISION)
    means = tl.load(mean + head * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    projected += tl.sum(weights, axis=1)[:, None] * means[None, :]
    written = exact_mask & (exact_weights > 0)
    projected += merged_sums(exact, exact_query, exact_weights, written, channel, channel < D, D)
    tl.store(
        out + queries[:, None] * D + channel[None, :],
        projected.to(out.dtype.element_ty),
        mask=query_mask & channel_mask,
    )
