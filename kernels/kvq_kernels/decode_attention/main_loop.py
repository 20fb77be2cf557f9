"""Main loop of decode attention: online softmax over whole tiles of tokens that keys and values both hold packed.

Each side is read by the first path that fits: `uniform*.py`, `vector_codebook.py`, `scalar_codebook.py`, else by the
generic functions below, which call `dequantize.py`. `kernel.py` calls this and reads the tail. Variables are named as
in Triton's attention tutorial: qk scores, m_i their maximum, p weights, l_i their sum, acc outputs, alpha rescaling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.byte_permute import load_table
from kvq_kernels.decode_attention.dequantize import dequantize
from kvq_kernels.decode_attention.one_hot_mma import mma_layout_zeros
from kvq_kernels.decode_attention.outlier_corrections import correct_scores, correct_values
from kvq_kernels.decode_attention.paging import at_tile, tile_page
from kvq_kernels.decode_attention.rope import load_cos_sin, pair_channels, position_cos_sin, unrotate
from kvq_kernels.decode_attention.scalar_codebook import (
    scalar_codebook_accumulate,
    scalar_codebook_fits,
    scalar_codebook_init,
    scalar_codebook_scores,
    scalar_codebook_store,
)
from kvq_kernels.decode_attention.spec import block_tokens, column_tiles
from kvq_kernels.decode_attention.uniform import uniform_fits
from kvq_kernels.decode_attention.uniform_keys import uniform_queries, uniform_scores
from kvq_kernels.decode_attention.uniform_values import (
    uniform_accumulate,
    uniform_init,
    uniform_prefetch,
    uniform_store,
)
from kvq_kernels.decode_attention.vector_codebook import (
    SUBTILE,
    subtile_tokens,
    vector_codebook_accumulate,
    vector_codebook_fits,
    vector_codebook_init,
    vector_codebook_scores,
    vector_codebook_store,
)

#: log2 of the factor on p: p times small scales would fall below 2^-14, where float16 loses bits.
LOG2_P_FACTOR = tl.constexpr(4.0)


@triton.jit
def attend_tiles(
    q, partial, logsum, first_query, keys, values, first, last, rope, start, scale,
    SK: tl.constexpr, SV: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [first, last) of N packed tokens; start: position of packed token 0.

    A tile is split into L subtiles of R tokens (see `vector_codebook.subtile_tokens`).
    """
    VECTOR_KEYS: tl.constexpr = vector_codebook_fits(SK, STYLE, WIDTH, True)
    VECTOR_VALUES: tl.constexpr = vector_codebook_fits(SV, STYLE, WIDTH, False)
    SCALAR_KEYS: tl.constexpr = scalar_codebook_fits(SK, STYLE, WIDTH, KD, True)
    SCALAR_VALUES: tl.constexpr = scalar_codebook_fits(SV, STYLE, WIDTH, VD, False)
    SUBTILED: tl.constexpr = VECTOR_KEYS or VECTOR_VALUES or SCALAR_KEYS or SCALAR_VALUES
    L: tl.constexpr = N // SUBTILE if SUBTILED else 1
    R: tl.constexpr = N // L
    BLOCK: tl.constexpr = block_tokens(SK, SV) if SUBTILED else 1
    UNIFORM_KEYS: tl.constexpr = L == 1 and uniform_fits(SK, STYLE, N, True)
    UNIFORM_VALUES: tl.constexpr = L == 1 and uniform_fits(SV, STYLE, N, False)
    line = tl.arange(0, R)
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    if UNIFORM_KEYS:
        queries = uniform_queries(q, SK, GROUP, M, KD)
    elif VECTOR_KEYS or SCALAR_KEYS:
        queries = q  # read plane by plane: registers hold scores and sums
    else:
        queries = generic_queries(q, SK, STYLE, WIDTH, GROUP, M, E)
    if UNIFORM_VALUES:
        acc = uniform_init(SV, M)
    elif VECTOR_VALUES:
        acc = vector_codebook_init(SV, M)
    elif SCALAR_VALUES:
        acc = scalar_codebook_init(SV, M)
    else:
        acc = generic_init(SV, M, E)
    key_table = load_table(keys, SK) if SCALAR_KEYS else ()
    value_table = load_table(values, SV) if SCALAR_VALUES else ()
    mma_layout = mma_layout_zeros(q, SK.dim) if SK.outliers + SV.outliers > 0 else 0
    key_page, value_page = tile_page(keys, SK, first, N, last), tile_page(values, SV, first, N, last)
    for tile in tl.range(first, last, num_stages=STAGES):
        k, k_tile, k_start = at_tile(keys, SK, tile, N, key_page, start)
        v, v_tile, _ = at_tile(values, SV, tile, N, value_page, start)
        # The next tile's pages, now: a tile's loads wait for them.
        key_page, value_page = tile_page(keys, SK, tile + 1, N, last), tile_page(values, SV, tile + 1, N, last)
        qk = ()
        if UNIFORM_KEYS:
            unscaled = (uniform_scores(queries, k, SK, k_tile, M, N, KD, PRECISION),)
        elif VECTOR_KEYS:
            unscaled = vector_codebook_scores(
                queries, k, SK, k_tile * N, rope, k_start, STYLE, WIDTH, GROUP, M, L, BLOCK, KD, PRECISION
            )
        elif SCALAR_KEYS:
            unscaled = scalar_codebook_scores(
                queries, key_table, k, SK, k_tile * N, rope, k_start, STYLE, WIDTH, GROUP, M, L, R, BLOCK, KD, PRECISION
            )
        else:
            unscaled = ()
            for i in tl.static_range(L):
                within = subtile_tokens(line, i, R, BLOCK)
                s = generic_scores(
                    queries, k, SK, k_tile * N, k_tile * N + within, within, rope, k_start, STYLE, WIDTH, M, R, E,
                    KD, PRECISION,
                )  # fmt: skip
                unscaled = unscaled + (s,)
        if UNIFORM_VALUES:
            prefetched = uniform_prefetch(v, SV, v_tile * N, M, N)
        if SK.outliers > 0:
            unscaled = correct_scores(
                unscaled, mma_layout, q, k, SK, k_tile * N, rope, k_start, STYLE, WIDTH, GROUP, M, L, R, BLOCK,
                PRECISION,
            )  # fmt: skip
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
        if UNIFORM_VALUES:
            acc = uniform_accumulate(acc, p[0], alpha, prefetched, v, SV, v_tile, M, N, VD, PRECISION)
        elif VECTOR_VALUES:
            acc = vector_codebook_accumulate(acc, p, alpha, v, SV, v_tile * N, M, L, BLOCK, VD, PRECISION)
        elif SCALAR_VALUES:
            acc = scalar_codebook_accumulate(
                acc, value_table, p, alpha, v, SV, v_tile * N, M, L, R, BLOCK, VD, PRECISION
            )
        else:
            acc = generic_accumulate(acc, p, alpha, v, SV, v_tile * N, L, R, BLOCK, E, VD, PRECISION)
        if SV.outliers > 0:
            sums = correct_values(
                acc[0] if SCALAR_VALUES else acc, mma_layout, p, v, SV, v_tile * N, VECTOR_VALUES, SCALAR_VALUES,
                GROUP, M, L, R, BLOCK, E, PRECISION,
            )  # fmt: skip
            acc = (sums, acc[1]) if SCALAR_VALUES else sums
        m_i = m_ij
    out = split_output(partial, first_query, SV.dim, M)
    if last > first:
        if UNIFORM_VALUES:
            uniform_store(acc, out, l_i, SV, GROUP, M)
        elif VECTOR_VALUES:
            vector_codebook_store(acc, out, l_i, SV, GROUP, M)
        elif SCALAR_VALUES:
            scalar_codebook_store(acc, out, l_i, SV, GROUP, M)
        else:
            generic_store(acc, out, l_i, SV, GROUP, M, E)
    tl.store(
        split_output(logsum, first_query, 1, M),
        m_i + tl.log2(l_i) - LOG2_P_FACTOR,
        mask=tl.arange(0, M) < GROUP,
    )


@triton.jit
def split_output(pointer, first_query, D: tl.constexpr, M: tl.constexpr):
    """Pointers [M] to this program's D outputs of each query head from `first_query` on; the program's split is its
    axis 1.

    Computed where they are used: pointers and splits that are kept across a loop take registers.
    """
    query = first_query + tl.arange(0, M)
    return pointer + (query * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * D


@triton.jit
def generic_queries(
    q, S: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr
):
    """Column tiles [M, E] of the queries in their type; with RoPE both halves of each tile of pairs, in float32."""
    D: tl.constexpr = S.dim
    P: tl.constexpr = column_tiles(S, E)
    column, member = tl.arange(0, E)[None, :], tl.arange(0, M)[:, None]
    planes = ()
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = j * E + column
            mask = (member < GROUP) & (channel < D)
            planes = planes + (tl.load(q + member * D + channel, mask=mask, other=0.0),)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            mask = (member < GROUP) & (pair < D // 2)
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            planes = planes + (
                tl.load(q + member * D + c1, mask=mask, other=0.0).to(tl.float32),
                tl.load(q + member * D + c2, mask=mask, other=0.0).to(tl.float32),
            )
    return planes


@triton.jit
def unrotate_query(q1, q2, rope, position, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """R(-position) of queries, times the rotation's scale, which keys would otherwise be multiplied by."""
    cos, sin = position_cos_sin(rope, position + tl.zeros([1], tl.int32), pair, WIDTH, D)
    return unrotate(q1, q2, cos, sin)


@triton.jit
def generic_scores(
    queries, k, S: tl.constexpr, begin, token, within, rope, start, STYLE: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, R: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k, float32 [M, R], of packed tokens `token` [R] at positions `within` a tile that starts at `begin`.

    A key is R(start + begin) R(within) x: the first rotation is undone on the query, the second applied to x.
    """
    D: tl.constexpr = S.dim
    P: tl.constexpr = column_tiles(S, E)
    column = tl.arange(0, E)
    row = token[:, None]
    qk = tl.zeros([M, R], tl.float32)
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = (j * E + column)[None, :]
            x = dequantize(k, S, row, channel, channel < D)
            qk = tl.dot(queries[j].to(T), tl.trans(x.to(T)), qk, input_precision=PRECISION)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            mask = (pair < D // 2)[None, :]
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            x1 = dequantize(k, S, row, c1[None, :], mask)
            x2 = dequantize(k, S, row, c2[None, :], mask)
            cos, sin = load_cos_sin(rope[1], within[:, None], pair[None, :], WIDTH, D)
            a1, a2 = unrotate_query(queries[2 * j], queries[2 * j + 1], rope, start + begin, pair, WIDTH, D)
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            qk = tl.dot(a1.to(T), tl.trans(x1.to(T)), qk, input_precision=PRECISION)
            qk = tl.dot(a2.to(T), tl.trans(x2.to(T)), qk, input_precision=PRECISION)
    return qk


@triton.jit
def generic_init(S: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Empty accumulator: column tiles [M, E]."""
    acc = ()
    for _ in tl.static_range(column_tiles(S, E)):
        acc = acc + (tl.zeros([M, E], tl.float32),)
    return acc


@triton.jit
def generic_accumulate(
    acc, p, alpha, v, S: tl.constexpr, begin, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc alpha + p V, column tiles [M, E], of the tile that starts at packed token `begin`."""
    new = ()
    for j in tl.static_range(column_tiles(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        a = acc[j] * alpha[:, None]
        for i in tl.static_range(L):
            token = begin + subtile_tokens(tl.arange(0, R), i, R, BLOCK)
            x = dequantize(v, S, token[:, None], channel, channel < S.dim)
            a = tl.dot(p[i].to(T), x.to(T), a, input_precision=PRECISION)
        new = new + (a,)
    return new


@triton.jit
def generic_store(acc, out, l_i, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Store acc / l_i at the pointers `out` [M]."""
    member = tl.arange(0, M)[:, None]
    for j in tl.static_range(column_tiles(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        mask = (member < GROUP) & (channel < S.dim)
        tl.store(out[:, None] + channel, acc[j] / l_i[:, None], mask=mask)
