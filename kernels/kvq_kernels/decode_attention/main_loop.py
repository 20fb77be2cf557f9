"""Main loop of decode attention: online softmax over whole tiles of tokens that keys and values both hold packed.

How a tile is read follows from the sides' formats: K and V have the functions of their readers. `kernel.py` calls this,
and reads the other tokens. Variables are named as in Triton's attention tutorial: qk scores, m_i their maximum,
p weights, l_i their sum, acc outputs, alpha rescaling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.addresses import at_tile, tile_page
from kvq_kernels.decode_attention.one_hot_mma import mma_layout_zeros
from kvq_kernels.decode_attention.outlier_corrections import correct_scores, correct_values

#: log2 of the factor on p: p times small scales would fall below 2^-14, where float16 loses bits.
LOG2_P_FACTOR = tl.constexpr(4.0)


@triton.jit
def attend_tiles(
    q, partial, logsum, first_query, keys, values, first, last, rope, start, scale, K: tl.constexpr, V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [first, last) of packed tokens; start: position of packed token 0. K, V: `TileLoop`s."""
    L: tl.constexpr = K.L
    M: tl.constexpr = K.M
    N: tl.constexpr = K.N
    SK: tl.constexpr = K.S
    SV: tl.constexpr = V.S
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    queries = K.reader.queries(q, K)
    acc = V.reader.init(V)
    key_table, value_table = K.reader.table(keys.packed, K), V.reader.table(values.packed, V)
    mma_layout = mma_layout_zeros(q, SK.dim) if SK.outliers + SV.outliers > 0 else 0
    key_page, value_page = tile_page(keys, SK, first, N, last), tile_page(values, SV, first, N, last)
    for tile in tl.range(first, last, num_stages=STAGES):
        k, k_tile, k_start = at_tile(keys, SK, tile, N, key_page, start)
        v, v_tile, _ = at_tile(values, SV, tile, N, value_page, start)
        # The next tile's pages, now: a tile's loads wait for them.
        key_page, value_page = tile_page(keys, SK, tile + 1, N, last), tile_page(values, SV, tile + 1, N, last)
        unscaled = K.reader.scores(queries, key_table, k.packed, k_tile, rope, k_start, K)
        prefetched = V.reader.prefetch(v.packed, v_tile, V)
        if SK.outliers > 0:
            unscaled = correct_scores(unscaled, mma_layout, q, k, k_tile * N, rope, k_start, K)
        qk = ()
        for i in tl.static_range(L):
            qk = qk + (unscaled[i] * scale,)
        largest = qk[0]
        for i in tl.static_range(1, L):
            largest = tl.maximum(largest, qk[i])
        m_ij = tl.maximum(m_i, tl.max(largest, axis=1))
        alpha = tl.exp2(m_i - m_ij)
        shifted_max = (m_ij - LOG2_P_FACTOR)[:, None]
        p_sum = tl.exp2(qk[0] - shifted_max)
        p = (p_sum,)
        for i in tl.static_range(1, L):
            w = tl.exp2(qk[i] - shifted_max)
            p_sum += w
            p = p + (w,)
        l_i = l_i * alpha + tl.sum(p_sum, axis=1)
        acc = V.reader.accumulate(acc, p, alpha, prefetched, value_table, v.packed, v_tile, V)
        if SV.outliers > 0:
            acc = correct_values(acc, mma_layout, p, v, v_tile * N, V)
        m_i = m_ij
    out = split_output(partial, first_query, SV.dim, M)
    if last > first:
        V.reader.store(acc, out, l_i, V)
    tl.store(
        split_output(logsum, first_query, 1, M),
        m_i + tl.log2(l_i) - LOG2_P_FACTOR,
        mask=tl.arange(0, M) < K.GROUP,
    )


@triton.jit
def split_output(pointer, first_query, D: tl.constexpr, M: tl.constexpr):
    """Pointers [M] to this program's D outputs of each query head from `first_query` on; the program's split is its
    axis 1.

    Computed where they are used: pointers and splits that are kept across a loop take registers.
    """
    query = first_query + tl.arange(0, M)
    return pointer + (query * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * D
