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

from kvq_kernels.decode_attention.addresses import at_stored_head
from kvq_kernels.decode_attention.exact_tokens import attend_exact
from kvq_kernels.decode_attention.main_loop import attend_tiles
from kvq_kernels.decode_attention.mixed_tokens import attend_mixed, attend_mixed_noinline
from kvq_kernels.decode_attention.tiles import mixed_out_of_line

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
    values,  # `SidePointers`
    key_strides,
    value_strides,  # `SideStrides`
    ring_size,  # tokens that the keys' and the values' ring buffers hold
    rope,  # coarse, fine, fine_half, offset
    scale,  # softmax's, times log2(e)
    K: tl.constexpr,  # `TileLoop`s of the keys and the values; of several queries, GROUP is the rows of a program
    V: tl.constexpr,
    HEADS: tl.constexpr,  # kv heads
    QUERIES: tl.constexpr,  # queries per row, padded to a power of two
    BLOCKS: tl.constexpr,  # programs that share the query rows of a kv head
    SINKS: tl.constexpr,
    MIXED_TILE: tl.constexpr,  # tokens of a tile of mixed ones
    EXACT_TILE: tl.constexpr,  # of exact ones
    EXACT_PAIRS: tl.constexpr,  # of channels of a column tile of exact tokens with RoPE
    XD: tl.constexpr,  # type that exact tokens are multiplied in; None: in float32, as mixed ones
    PACKED_EXACT: tl.constexpr,  # packed tokens are read as exact ones
    STAGES: tl.constexpr,
):
    SK: tl.constexpr = K.S
    SV: tl.constexpr = V.S
    STYLE: tl.constexpr = K.STYLE
    WIDTH: tl.constexpr = K.WIDTH
    GROUP: tl.constexpr = K.GROUP
    M: tl.constexpr = K.M
    N: tl.constexpr = K.N
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
    k = at_stored_head(keys, key_strides, SK, row, head, key_head)
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
            q, partial, logsum, first_query, k, v, first, last, rope, start + BASE, scale, K, V, STAGES,
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
            value_count, ring_size, rope, start, scale, K, SV, SINKS, MIXED_TILE, sight, QUERIES,
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
