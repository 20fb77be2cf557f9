"""The main loop: whole tiles of tokens that keys and values both hold packed, without masks."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.byte_permute import load_table
from kvq_kernels.decode_attention.dequantize import number
from kvq_kernels.decode_attention.one_hot_mma import sparse_threads
from kvq_kernels.decode_attention.outlier_corrections import sparse_scores, sparse_values
from kvq_kernels.decode_attention.rope import pair_channels, position_turn, turn
from kvq_kernels.decode_attention.scalar_codebook import (
    looks_up,
    lookup_nothing,
    lookup_scores,
    lookup_store,
    lookup_values,
)
from kvq_kernels.decode_attention.spec import block_tokens, get, plane_count
from kvq_kernels.decode_attention.uniform import folds
from kvq_kernels.decode_attention.uniform_keys import fold_queries, fold_scores
from kvq_kernels.decode_attention.uniform_values import fold_load, fold_nothing, fold_store, fold_values
from kvq_kernels.decode_attention.vector_codebook import (
    LINES,
    gather_nothing,
    gather_scores,
    gather_store,
    gather_values,
    gathers,
    line_tokens,
)

#: Weights are multiplied by 2 to this: float16 has few digits below 2^-14, where small weights times small scales lie.
LIFT = tl.constexpr(4.0)


@triton.jit
def attend_main(
    q, partial, logsum, place, splits, k, v, first, last, rope, start, scale,
    SK: tl.constexpr, SV: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of N packed tokens; start: position of packed token 0.

    A tile is dealt to L tiles of scores of R tokens (see `gather.line_tokens`): softmax sees no order.
    """
    GATHER_KEYS: tl.constexpr = gathers(SK, STYLE, WIDTH, True)
    GATHER_VALUES: tl.constexpr = gathers(SV, STYLE, WIDTH, False)
    LOOK_UP_KEYS: tl.constexpr = looks_up(SK, STYLE, WIDTH, KD, True)
    LOOK_UP_VALUES: tl.constexpr = looks_up(SV, STYLE, WIDTH, VD, False)
    IN_LINES: tl.constexpr = GATHER_KEYS or GATHER_VALUES or LOOK_UP_KEYS or LOOK_UP_VALUES
    L: tl.constexpr = N // LINES if IN_LINES else 1
    R: tl.constexpr = N // L
    BLOCK: tl.constexpr = block_tokens(SK, SV) if IN_LINES else 1
    FOLD_KEYS: tl.constexpr = L == 1 and folds(SK, STYLE, N, True)
    FOLD_VALUES: tl.constexpr = L == 1 and folds(SV, STYLE, N, False)
    line = tl.arange(0, R)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if FOLD_KEYS:
        queries = fold_queries(q, SK, GROUP, M, KD)
    elif GATHER_KEYS or LOOK_UP_KEYS:
        queries = q  # read plane by plane: the registers hold scores and sums
    else:
        queries = load_queries(q, SK, STYLE, WIDTH, GROUP, M, E)
    if FOLD_VALUES:
        acc = fold_nothing(SV, M)
    elif GATHER_VALUES:
        acc = gather_nothing(SV, M)
    elif LOOK_UP_VALUES:
        acc = lookup_nothing(SV, M)
    else:
        acc = plain_nothing(SV, M, E)
    key_table = load_table(k, SK) if LOOK_UP_KEYS else ()
    value_table = load_table(v, SV) if LOOK_UP_VALUES else ()
    threads = sparse_threads(q, get(SK, "dim")) if get(SK, "slots") + get(SV, "slots") > 0 else 0
    for tile in tl.range(first, last, num_stages=STAGES):
        scores = ()
        if FOLD_KEYS:
            found = (fold_scores(queries, k, SK, tile, M, N, KD, PRECISION),)
        elif GATHER_KEYS:
            found = gather_scores(
                queries, k, SK, tile * N, rope, start, STYLE, WIDTH, GROUP, M, L, BLOCK, KD, PRECISION
            )
        elif LOOK_UP_KEYS:
            found = lookup_scores(
                queries, key_table, k, SK, tile * N, rope, start, STYLE, WIDTH, GROUP, M, L, R, BLOCK, KD, PRECISION
            )
        else:
            found = ()
            for i in tl.static_range(L):
                within = line_tokens(line, i, R, BLOCK)
                s = plain_scores(
                    queries, k, SK, tile * N, tile * N + within, within, rope, start, STYLE, WIDTH, M, R, E, KD,
                    PRECISION,
                )  # fmt: skip
                found = found + (s,)
        if FOLD_VALUES:
            loaded = fold_load(v, SV, tile * N, M, N)
        if get(SK, "slots") > 0:
            found = sparse_scores(
                found, threads, q, k, SK, tile * N, rope, start, STYLE, WIDTH, GROUP, M, L, R, BLOCK, PRECISION
            )
        for i in tl.static_range(L):
            scores = scores + (found[i] * scale,)
        most = scores[0]
        for i in tl.static_range(1, L):
            most = tl.maximum(most, scores[i])
        peak = tl.maximum(top, tl.max(most, axis=1))
        shrink = tl.exp2(top - peak)
        base = (peak - LIFT)[:, None]
        mass = tl.exp2(scores[0] - base)
        weights = (mass,)
        for i in tl.static_range(1, L):
            w = tl.exp2(scores[i] - base)
            mass += w
            weights = weights + (w,)
        total = total * shrink + tl.sum(mass, axis=1)
        if FOLD_VALUES:
            acc = fold_values(acc, weights[0], shrink, loaded, v, SV, tile, M, N, VD, PRECISION)
        elif GATHER_VALUES:
            acc = gather_values(acc, weights, shrink, v, SV, tile * N, M, L, BLOCK, VD, PRECISION)
        elif LOOK_UP_VALUES:
            acc = lookup_values(acc, value_table, weights, shrink, v, SV, tile * N, M, L, R, BLOCK, VD, PRECISION)
        else:
            acc = plain_values(acc, weights, shrink, v, SV, tile * N, L, R, BLOCK, E, VD, PRECISION)
        if get(SV, "slots") > 0:
            sums = sparse_values(
                acc[0] if LOOK_UP_VALUES else acc, threads, weights, v, SV, tile * N, GATHER_VALUES, LOOK_UP_VALUES,
                GROUP, M, L, R, BLOCK, E, PRECISION,
            )  # fmt: skip
            acc = (sums, acc[1]) if LOOK_UP_VALUES else sums
        top = peak
    out = output(partial, place, splits, get(SV, "dim"), M)
    if last > first:
        if FOLD_VALUES:
            fold_store(acc, out, total, SV, GROUP, M)
        elif GATHER_VALUES:
            gather_store(acc, out, total, SV, GROUP, M)
        elif LOOK_UP_VALUES:
            lookup_store(acc, out, total, SV, GROUP, M)
        else:
            plain_store(acc, out, total, SV, GROUP, M, E)
    tl.store(output(logsum, place, splits, 1, M), top + tl.log2(total) - LIFT, mask=tl.arange(0, M) < GROUP)


@triton.jit
def output(pointer, place, splits, D: tl.constexpr, M: tl.constexpr):
    """Where each of M query heads, of which the first is at `place`, leaves D numbers. Computed where they are stored:
    pointers that wait for the end of a loop take registers."""
    return pointer + (place + tl.arange(0, M) * splits).to(tl.int64) * D


@triton.jit
def load_queries(
    q, S: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr
):
    """Planes [M, E] of the queries in their own type; with RoPE, the two of each plane of pairs, in float32."""
    D: tl.constexpr = get(S, "dim")
    P: tl.constexpr = plane_count(S, E)
    column, member = tl.arange(0, E)[None, :], tl.arange(0, M)[:, None]
    planes = ()
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = j * E + column
            mine = (member < GROUP) & (channel < D)
            planes = planes + (tl.load(q + member * D + channel, mask=mine, other=0.0),)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            mine = (member < GROUP) & (pair < D // 2)
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            planes = planes + (
                tl.load(q + member * D + c1, mask=mine, other=0.0).to(tl.float32),
                tl.load(q + member * D + c2, mask=mine, other=0.0).to(tl.float32),
            )
    return planes


@triton.jit
def turn_back(q1, q2, rope, position, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """R(-position) of queries, times the scale that keys would have been multiplied by."""
    cos, sin = position_turn(rope, position + tl.zeros([1], tl.int32), pair, WIDTH, D)
    return q1 * cos + q2 * sin, q2 * cos - q1 * sin


@triton.jit
def plain_scores(
    queries, k, S: tl.constexpr, begin, token, within, rope, start, STYLE: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, R: tl.constexpr, E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k, float32 [M, R], of packed tokens `token` [R], which lie `within` a tile that starts at `begin`.

    A key of the tile is R(start + begin) R(within) x: the first turn is taken back from the query, the second made.
    """
    D: tl.constexpr = get(S, "dim")
    P: tl.constexpr = plane_count(S, E)
    column = tl.arange(0, E)
    at = token[:, None]
    scores = tl.zeros([M, R], tl.float32)
    if STYLE == "none":
        for j in tl.static_range(P):
            channel = (j * E + column)[None, :]
            x = number(k, S, at, channel, channel < D)
            scores = tl.dot(queries[j].to(T), tl.trans(x.to(T)), scores, input_precision=PRECISION)
    else:
        for j in tl.static_range(P // 2):
            pair = j * E + column
            real = (pair < D // 2)[None, :]
            c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
            x1 = number(k, S, at, c1[None, :], real)
            x2 = number(k, S, at, c2[None, :], real)
            cos, sin = turn(rope[1], within[:, None], pair[None, :], WIDTH, D)
            a1, a2 = turn_back(queries[2 * j], queries[2 * j + 1], rope, start + begin, pair, WIDTH, D)
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            scores = tl.dot(a1.to(T), tl.trans(x1.to(T)), scores, input_precision=PRECISION)
            scores = tl.dot(a2.to(T), tl.trans(x2.to(T)), scores, input_precision=PRECISION)
    return scores


@triton.jit
def plain_nothing(S: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """`acc` of no tokens."""
    acc = ()
    for _ in tl.static_range(plane_count(S, E)):
        acc = acc + (tl.zeros([M, E], tl.float32),)
    return acc


@triton.jit
def plain_values(
    acc, weights, shrink, v, S: tl.constexpr, begin, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc shrink + weights V, planes [M, E], of the tile that starts at packed token `begin`."""
    new = ()
    for j in tl.static_range(plane_count(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        a = acc[j] * shrink[:, None]
        for i in tl.static_range(L):
            token = begin + line_tokens(tl.arange(0, R), i, R, BLOCK)
            x = number(v, S, token[:, None], channel, channel < get(S, "dim"))
            a = tl.dot(weights[i].to(T), x.to(T), a, input_precision=PRECISION)
        new = new + (a,)
    return new


@triton.jit
def plain_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    member = tl.arange(0, M)[:, None]
    for j in tl.static_range(plane_count(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        mine = (member < GROUP) & (channel < get(S, "dim"))
        tl.store(out[:, None] + channel, acc[j] / total[:, None], mask=mine)
