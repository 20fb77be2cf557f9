"""Split-KV pass and its combination (flash decoding): the two kernels of decode attention.

A program of `split_kernel` attends to some tokens of one row for all query heads of one kv head (of several queries per
row, for some of them) and leaves softmax(q K^T) V of these tokens and their log-sum-exp. The first programs share the
whole tiles that both sides hold packed (`main_loop.py`), the next ones the exact tokens, sinks and recent ones
(`exact_tokens.py`), the last ones the mixed tokens: packed on one side only, or in part of a tile. `combine_kernel`
merges them. `launch.py` passes the arguments.
Variables are named as in Triton's tutorial, see `main_loop.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import at_stored_head, load_cached
from kvq_kernels.decode_attention.exact_tokens import attend_exact
from kvq_kernels.decode_attention.main_loop import attend_tiles, split_output
from kvq_kernels.decode_attention.paging import at_paged_head
from kvq_kernels.decode_attention.rope import pair_channels, position_cos_sin
from kvq_kernels.decode_attention.several_queries import finite_max, seen_tokens
from kvq_kernels.decode_attention.spec import column_tiles, mixed_out_of_line

#: Cost of an exact token and of a mixed one, in tokens of whole tiles: about the ratio of their times in compiled code.
EXACT_COST, MIXED_COST = tl.constexpr(3), tl.constexpr(16)


@triton.jit
def split_kernel(
    query,  # [B, Q, D]
    partial,  # float32 [B, Q, programs, D]
    logsum,  # float32 [B, Q, programs], base 2; -inf: no tokens, `partial` is then not written
    lengths,  # int32 [B]
    counts,  # int32 [B] x 2: packed tokens of the keys, of the values
    window,  # newest tokens that a query sees, its own included
    earlier,  # queries before the newest one; None: there is one query
    heads,  # int32 [heads of this launch] x 3: kv head, its index in the keys' codes and in the values'; or None
    keys,
    values,  # tuples of pointers, see `dequantize.py`
    key_strides,
    value_strides,
    pages,  # (block table, slots) x 2 of the keys and the values; or None: no side has pages
    ring_size,  # tokens that the keys' and the values' ring buffers hold
    rope,  # coarse, fine, fine_half, offset
    scale,  # softmax's, times log2(e)
    SK: tl.constexpr,  # SideSpec
    SV: tl.constexpr,
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    HEADS: tl.constexpr,  # kv heads
    GROUP: tl.constexpr,  # query heads of a kv head; of several queries the rows of a program, see `several_queries.py`
    M: tl.constexpr,  # GROUP, padded to a power of two
    QUERIES: tl.constexpr,  # queries per row, padded to a power of two
    BLOCKS: tl.constexpr,  # programs that share the query rows of a kv head
    SINKS: tl.constexpr,
    N: tl.constexpr,  # tokens of a tile
    E: tl.constexpr,  # channels of a column tile
    KD: tl.constexpr,  # types that keys and values are multiplied in
    VD: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 products
    MIXED_TILE: tl.constexpr,  # tokens of a tile of mixed ones
    EXACT_TILE: tl.constexpr,  # of exact ones
    EXACT_PAIRS: tl.constexpr,  # of channels of a column tile of exact tokens with RoPE
    XD: tl.constexpr,  # type that exact tokens are multiplied in; None: in float32, as mixed ones
    PACKED_EXACT: tl.constexpr,  # packed tokens are read as exact ones
    STAGES: tl.constexpr,
):
    # Heads first: programs are spread over the multiprocessors in this order, so that those of one multiprocessor read
    # the codebooks of few heads, which its L1 cache holds (two of 8 heads on 132 multiprocessors).
    stored_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = 0  # of the kv head's query rows
    if BLOCKS > 1:
        first_row = stored_head % BLOCKS * GROUP
        stored_head = stored_head // BLOCKS
    programs = tl.num_programs(1)
    length = tl.load(lengths + row)
    key_count, value_count = tl.load(counts[0] + row), tl.load(counts[1] + row)
    if heads is None:
        head, key_head, value_head = stored_head, stored_head, stored_head
    else:
        head, key_head = tl.load(heads[0] + stored_head), tl.load(heads[1] + stored_head)
        value_head = tl.load(heads[2] + stored_head)
    if SK.cell > 0:
        k = at_paged_head(keys, key_strides, SK, row, head, key_head, pages[0], pages[1])
    else:
        k = at_stored_head(keys, key_strides, SK, row, head, key_head)
    if SV.cell > 0:
        v = at_paged_head(values, value_strides, SV, row, head, value_head, pages[2], pages[3])
    else:
        v = at_stored_head(values, value_strides, SV, row, head, value_head)
    D: tl.constexpr = SK.dim
    first_query = row * (HEADS * BLOCKS * GROUP) + head * (BLOCKS * GROUP) + first_row
    q = query + first_query.to(tl.int64) * D
    start = 0 if rope[3] is None else tl.load(rope[3] + row)
    FIRST: tl.constexpr = SK.first  # tiles are counted from place 0, which would be token BASE
    BASE: tl.constexpr = SINKS - FIRST
    packed = tl.minimum(key_count, value_count)
    if QUERIES > 1:  # whole tiles have no mask: all queries see them
        packed = tl.minimum(packed, tl.maximum(length - earlier - SINKS, 0))
    tiles = (packed + FIRST) // N
    oldest = tl.maximum(length - window, 0)
    begin = tl.minimum(tl.cdiv(tl.maximum(oldest - SINKS, 0) + FIRST, N), tiles)
    if QUERIES > 1:
        oldest = tl.maximum(length - earlier - window, 0)
    sight = None if QUERIES == 1 else (first_row, length, window, earlier)
    # Of the tokens outside of whole tiles, those before and those behind these tiles.
    early_end, late = tl.minimum(length, BASE + begin * N), tl.maximum(BASE + tiles * N, oldest)
    if XD is None or PACKED_EXACT:
        early = tl.maximum(early_end - oldest, 0)
        others = early + tl.maximum(length - late, 0)
        exact = others if PACKED_EXACT else others * 0
        mixed = others - exact
        mixed_from, mixed_early, mixed_late = oldest, early, late
    else:
        packed_end = tl.minimum(length, SINKS + tl.maximum(key_count, value_count))
        mixed_from, mixed_late = tl.maximum(oldest, SINKS), tl.maximum(late, SINKS)
        mixed_early = tl.maximum(tl.minimum(early_end, packed_end) - mixed_from, 0)
        mixed = mixed_early + tl.maximum(packed_end - mixed_late, 0)
        early, late = tl.maximum(tl.minimum(length, SINKS) - oldest, 0), tl.maximum(packed_end, oldest)
        exact = early + tl.maximum(length - late, 0)
    splits, mixed_programs = divide_programs(programs, (tiles - begin) * N, exact, mixed, EXACT_TILE, MIXED_TILE)
    if split < splits:
        each = tl.cdiv(tiles - begin, splits)
        first = tl.minimum(begin + split * each, tiles)
        last = tl.minimum(first + each, tiles)
        attend_tiles(
            q, partial, logsum, first_query, k, v, first, last, rope, start + BASE, scale,
            SK, SV, STYLE, WIDTH, GROUP, M, N, E, KD, VD, PRECISION, STAGES,
        )  # fmt: skip
    elif split < programs - mixed_programs:
        if XD is not None:
            first, last = share(split - splits, programs - mixed_programs - splits, exact, EXACT_TILE)
            attend_exact(
                q, partial, logsum, first_query, k, v, first, last, oldest, early, late, key_count, value_count,
                ring_size, rope, start, scale, SK, SV, STYLE, WIDTH, GROUP, M, SINKS, PACKED_EXACT, EXACT_TILE,
                EXACT_PAIRS, XD, sight, QUERIES,
            )  # fmt: skip
    elif not PACKED_EXACT:
        first, last = share(split + mixed_programs - programs, mixed_programs, mixed, MIXED_TILE)
        (attend_mixed_noinline if mixed_out_of_line(SK, SV) else attend_mixed)(
            q, partial, logsum, first_query, k, v, first, last, mixed_from, mixed_early, mixed_late, key_count,
            value_count, ring_size, rope, start, scale, SK, SV, STYLE, WIDTH, GROUP, M, SINKS, E, PRECISION, MIXED_TILE,
            sight, QUERIES,
        )  # fmt: skip


@triton.jit
def divide_programs(programs, tile_tokens, exact, mixed, EXACT_TILE: tl.constexpr, MIXED_TILE: tl.constexpr):
    """(programs for whole tiles, programs for mixed tokens) of so many; the others are for exact tokens.

    So many that all take equally long; at least one for each part that is not empty.
    """
    exact_tiles, mixed_tiles = tl.cdiv(exact, EXACT_TILE), tl.cdiv(mixed, MIXED_TILE)
    exact_time, mixed_time = exact_tiles * (EXACT_TILE * EXACT_COST), mixed_tiles * (MIXED_TILE * MIXED_COST)
    whole = tl.maximum(exact_time + mixed_time + tile_tokens, 1).to(tl.float32)
    limit = programs - (tile_tokens > 0)
    for_mixed = _proportional(programs, mixed_time / whole, mixed_tiles, limit - (exact > 0))
    for_exact = _proportional(programs, exact_time / whole, exact_tiles, limit - for_mixed)
    return programs - for_exact - for_mixed, for_mixed


@triton.jit
def _proportional(programs, part, tiles, limit):
    """Programs for `tiles` tiles that take `part` of the time: at least one, at most `limit`, none without tiles."""
    wanted = tl.minimum(tl.ceil(programs * part).to(tl.int32), limit)
    each = tl.cdiv(tiles, tl.maximum(tl.minimum(wanted, tiles), 1))
    return tl.cdiv(tiles, tl.maximum(each, 1))


@triton.jit
def share(program, programs, tokens, N: tl.constexpr):
    """(first, end) of the tokens of one of `programs` programs: equally many tiles of N tokens for each."""
    each = tl.cdiv(tl.cdiv(tokens, N), programs) * N
    first = tl.minimum(program * each, tokens)
    return first, tl.minimum(first + each, tokens)


@triton.jit
def attend_mixed(
    q, partial, logsum, first_query, k, v, first, last, oldest, early, late, key_count, value_count,
    ring_size, rope, start, scale, SK: tl.constexpr, SV: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, SINKS: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, sight, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attend to mixed tokens [first, last) in float32: `early` tokens from `oldest` on, then all from `late` on.

    sight: of `seen_tokens`; None: one query, which sees all of these.
    """
    D: tl.constexpr = SK.dim
    P: tl.constexpr = column_tiles(SK, E)
    member, column, within = tl.arange(0, M), tl.arange(0, E), tl.arange(0, N)
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    tile = tl.arange(0, P)[:, None, None]
    acc = tl.zeros([P, M, E], tl.float32)
    if QUERIES > 1:
        seen_from, seen_end = seen_tokens(sight, M, QUERIES)
    for at in tl.range(first, last, N, num_stages=1):
        valid = at + within < last
        index = tl.minimum(at + within, last - 1)  # tables of cosines may end at the last token
        token = tl.where(index < early, oldest + index, index - early + late)
        tokens, mask_column = token[:, None], valid[:, None]
        qk = tl.zeros([M, N], tl.float32)
        if STYLE == "none":
            for j in tl.range(0, P, num_stages=1):
                channel = (j * E + column)[None, :]
                mask = (member[:, None] < GROUP) & (channel < D)
                a = tl.load(q + member[:, None] * D + channel, mask=mask, other=0.0).to(tl.float32)
                x = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, channel, mask_column & (channel < D))
                qk = tl.dot(a, tl.trans(x), qk, input_precision=PRECISION)
        else:
            for j in tl.range(0, P // 2, num_stages=1):
                pair = j * E + column
                c1, c2 = pair_channels(pair, STYLE, WIDTH, D)
                mask = (pair < D // 2)[None, :]
                cos, sin = position_cos_sin(rope, start + token, pair, WIDTH, D)
                x1 = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, c1[None, :], mask_column & mask)
                x2 = load_cached(k, SK, SINKS, ring_size[0], key_count, tokens, c2[None, :], mask_column & mask)
                mask = (member[:, None] < GROUP) & mask
                a1 = tl.load(q + member[:, None] * D + c1[None, :], mask=mask, other=0.0).to(tl.float32)
                a2 = tl.load(q + member[:, None] * D + c2[None, :], mask=mask, other=0.0).to(tl.float32)
                qk = tl.dot(a1, tl.trans(x1 * cos - x2 * sin), qk, input_precision=PRECISION)
                qk = tl.dot(a2, tl.trans(x2 * cos + x1 * sin), qk, input_precision=PRECISION)
        qk = tl.where(valid[None, :], qk * scale, float("-inf"))
        if QUERIES > 1:
            seen = (token[None, :] >= seen_from[:, None]) & (token[None, :] < seen_end[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
        finite = finite_max(m_ij, QUERIES)
        p = tl.exp2(qk - finite[:, None])
        alpha = tl.exp2(m_i - finite)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc *= alpha[None, :, None]
        for j in tl.range(0, P, num_stages=1):
            channel = (j * E + column)[None, :]
            x = load_cached(v, SV, SINKS, ring_size[1], value_count, tokens, channel, mask_column & (channel < D))
            acc += tl.where(tile == j, tl.dot(p, x, input_precision=PRECISION)[None, :, :], 0.0)
        m_i = m_ij
    out = split_output(partial, first_query, D, M)
    if last > first:
        channel = tile * E + column[None, None, :]
        mask = (member[None, :, None] < GROUP) & (channel < D)
        tl.store(out[None, :, None] + channel, acc / l_i[None, :, None], mask=mask)
    tl.store(split_output(logsum, first_query, 1, M), m_i + tl.log2(l_i), mask=member < GROUP)


#: `attend_mixed` as a function that is called: a pass of the compiler is quadratic in the length of a function.
attend_mixed_noinline = triton.jit(attend_mixed.fn, noinline=True)


@triton.jit
def combine_kernel(partial, logsum, out, count, D: tl.constexpr, WIDE: tl.constexpr, S: tl.constexpr):
    """Merge splits: out [B * Q, D] = sum_s 2^(L_s - L) partial_s with L = log2 sum_s 2^L_s; zeros without tokens.

    One program per query head; S splits at once, as many as registers hold, by online softmax.
    """
    query_head = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, S), tl.arange(0, WIDE)
    first = query_head * count
    m_i, l_i = float("-inf"), 0.0
    acc = tl.zeros([WIDE], tl.float32)
    for begin in tl.range(0, count, S, num_stages=1):
        index = begin + split
        logsums = tl.load(logsum + first + index, mask=index < count, other=float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(logsums, axis=0))
        finite_max = tl.where(m_ij == float("-inf"), 0.0, m_ij)  # as long as all splits are empty
        alpha, weights = tl.exp2(m_i - finite_max), tl.exp2(logsums - finite_max)
        mask = (weights > 0)[:, None] & (channel < D)[None, :]
        x = tl.load(partial + (first + index)[:, None] * D + channel[None, :], mask=mask, other=0.0)
        l_i = l_i * alpha + tl.sum(weights, axis=0)
        acc = acc * alpha + tl.sum(x * weights[:, None], axis=0)
        m_i = m_ij
    merged = acc / tl.where(l_i > 0, l_i, 1.0)
    tl.store(out + query_head * D + channel, merged.to(out.dtype.element_ty), mask=channel < D)
