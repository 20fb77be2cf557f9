"""Attention to sinks, packed and recent tokens in one pass, where packed ones are codes of a transform's components.

A program of `split_kernel` is for one kv head, and either some tiles of packed tokens or some exact ones. Of a tile it
computes keys from the codes in registers, and adds codes times weights to its sums; the values' transform is applied to
the sums, once. A launch is for the heads with the same widths. Warp w has tokens 16 w to 16 w + 15 of every tile from
their codes to its own sums (a softmax of its own), so that nothing but S' of the keys and the queries passes through
shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.addresses import at_head
from kvq_kernels.decode_attention.exact_tokens import attend_exact
from kvq_kernels.decode_attention.kernel import share
from kvq_kernels.decode_attention.main_loop import split_output
from kvq_kernels.transform_attention.addresses import at_paged_head, at_row, at_tile, slot_of
from kvq_kernels.transform_attention.codes import chunks, load_codes, load_gains, value_codes
from kvq_kernels.transform_attention.rotated_keys import (
    key_constants,
    key_weights,
    rotated_keys,
    turned,
    turning_queries,
)

#: Factor on p: small p would fall below 2^-14, where float16 loses bits.
P_FACTOR = tl.constexpr(16.0)
#: Channels of the output that a program computes at once.
OUTPUT_CHANNELS = tl.constexpr(32)


# A kernel is compiled once as contexts grow, and for lists of heads of any length.
@triton.jit(do_not_specialize=["window", "splits", "room", "layer_heads", "key_heads", "value_heads"])
def split_kernel(
    query,  # [B, Q, D]
    partial,  # float32 [B, Q, programs, D]
    logsum,  # float32 [B, Q, programs], base 2; -inf: no tokens, `partial` is then not written
    lengths,  # int32 [B]
    counts,  # int32 [B], packed tokens
    window,  # newest tokens that the query sees, its own included
    splits,  # programs for packed tokens; those after them are for exact ones
    heads,  # int32 [heads of this launch] x 3: kv head, its index in the keys' codes and in the values'; or None
    layer_heads,  # kv heads
    key_heads,
    value_heads,  # heads that the keys' and the values' codes hold
    room,  # tokens of a row and head of gains
    pages,  # (block table, its stride, bytes of a page, stride of heads of gains, slots) x 2; or None
    keys,  # int32 pointers at the codes of all parts, and at the gains; see `fields`
    key_strides,  # (row, head) of the codes, in words
    values,
    value_strides,
    key_operands,  # synthesis, mean, unit of `Operands`
    value_operands,  # synthesis, mean
    shifts,  # of `lane_shifts`
    exact_keys,
    exact_values,  # `SidePointers`
    exact_key_strides,
    exact_value_strides,
    ring_size,  # tokens that the keys' and the values' ring buffers hold
    rope,  # coarse, fine, fine_half, offset
    scale,  # softmax's, times log2(e)
    KF: tl.constexpr,  # FieldSpec
    VF: tl.constexpr,
    SK: tl.constexpr,  # SideSpec of exact tokens
    SV: tl.constexpr,
    STYLE: tl.constexpr,  # "none", "half", "interleaved"
    WIDTH: tl.constexpr,  # rotated channels
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # GROUP, padded
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,  # tokens of a page; 0: a row is one run of memory
    FIRST: tl.constexpr,  # place of packed token 0 in pages
    N: tl.constexpr,  # tokens of a tile: 16 for each warp
    E: tl.constexpr,  # pairs of channels of a column tile
    RELOAD: tl.constexpr,  # S' of the keys is loaded for each tile
    HALF_SUMS: tl.constexpr,  # keys are summed in float16
    ASSEMBLY: tl.constexpr,  # PTX may be used
    PRECISION: tl.constexpr,  # of float32 products
    EXACT_TILE: tl.constexpr,  # tokens of a tile of exact ones
    EXACT_PAIRS: tl.constexpr,  # of channels of a column tile of these with RoPE
    XD: tl.constexpr,  # type that these are multiplied in
    STAGES: tl.constexpr,
):
    stored_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if heads is None:
        head, key_head, value_head = stored_head, stored_head, stored_head
    else:
        head, key_head = tl.load(heads[0] + stored_head), tl.load(heads[1] + stored_head)
        value_head = tl.load(heads[2] + stored_head)
    length, count = tl.load(lengths + row), tl.load(counts + row)
    first_query = (row * layer_heads + head) * GROUP
    q = query + first_query.to(tl.int64) * D
    start = 0 if rope[3] is None else tl.load(rope[3] + row)
    oldest = tl.maximum(length - window, 0)
    if split < splits:
        begin, end = (tl.maximum(oldest - SINKS, 0) + FIRST) // N, tl.cdiv(count + FIRST, N)
        if FIRST > 0:
            end = tl.where(count > 0, end, 0)
        each = tl.cdiv(tl.maximum(end - begin, 0), splits)
        first = tl.minimum(begin + split * each, end)
        key_pages, value_pages = None, None
        if PAGE > 0:
            packed_keys = at_paged_head(keys, key_strides, pages[3], key_head)
            packed_values = at_paged_head(values, value_strides, pages[8], value_head)
            key_pages = (pages[0] + row.to(tl.int64) * pages[1], pages[2])
            value_pages = (pages[5] + row.to(tl.int64) * pages[6], pages[7])
        else:
            packed_keys = at_row(keys, key_strides, key_heads, room, row, key_head)
            packed_values = at_row(values, value_strides, value_heads, room, row, value_head)
        attend_packed(
            q, partial, logsum, first_query,
            packed_keys, packed_values, key_pages, value_pages,
            key_operands, value_operands, shifts, key_head, value_head,
            first, tl.minimum(first + each, end), count, oldest - SINKS, rope, start + SINKS, scale,
            KF, VF, STYLE, WIDTH, D, GROUP, M, PAGE, FIRST, N, E, RELOAD, HALF_SUMS, ASSEMBLY, PRECISION, STAGES,
        )  # fmt: skip
    else:
        early = tl.maximum(tl.minimum(length, SINKS) - oldest, 0)
        late = tl.maximum(SINKS + count, oldest)
        exact = early + tl.maximum(length - late, 0)
        first, last = share(split - splits, tl.num_programs(1) - splits, exact, EXACT_TILE)
        key_slot, value_slot = row, row
        if PAGE > 0:
            key_slot, value_slot = slot_of(pages[4], row), slot_of(pages[9], row)
        k = at_head(exact_keys, exact_key_strides, SK, key_slot, head)
        v = at_head(exact_values, exact_value_strides, SV, value_slot, head)
        attend_exact(
            q, partial, logsum, first_query, k, v, first, last, oldest, early, late, count, count, ring_size, rope,
            start, scale, SK, SV, STYLE, WIDTH, GROUP, M, SINKS, False, EXACT_TILE,
            EXACT_PAIRS, XD,
        )  # fmt: skip


@triton.jit
def attend_packed(
    q, partial, logsum, first_query, keys, values, key_pages, value_pages,
    key_operands, value_operands, shifts, key_head, value_head, first, last, count, oldest, rope, start, scale,
    KF: tl.constexpr, VF: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, E: tl.constexpr, RELOAD: tl.constexpr,
    HALF_SUMS: tl.constexpr, ASSEMBLY: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [first, last) of N packed tokens; start: position of packed token 0, oldest: the first token
    that the query sees. Places in pages are counted instead of packed tokens."""
    if FIRST > 0:
        count, oldest, start = count + FIRST, tl.maximum(oldest, 0) + FIRST, start - FIRST
    B: tl.constexpr = N // 16
    VC: tl.constexpr = chunks(VF)
    constants = key_constants(key_operands, key_head, rope, KF, STYLE, WIDTH, D, N, E)
    position = tl.where(last > first, start + first * N, 0)  # tables of cosines may end at the last token
    queries, query_scale, steps = turning_queries(
        q, key_operands[2] + key_head * D, rope, position, scale, STYLE, WIDTH, D, GROUP, M, N, E, FIRST > 0,
    )  # fmt: skip
    sums = ()
    for i in tl.static_range(len(VC)):
        sums = sums + (tl.zeros([B, 8 * VC[i][1], M], tl.float32),)
    m_i = tl.full([B, M], float("-inf"), tl.float32)
    l_i = tl.zeros([B, 8, M], tl.float32)  # sums of p, over eight threads each
    token = tl.reshape(tl.arange(0, N), [B, 16])[:, :, None]
    seen = tl.maximum(count - oldest, 0).to(tl.uint32, bitcast=True)  # packed tokens that the query sees
    for tile in tl.range(first, last, num_stages=STAGES):
        remaining = count - tile * N
        k, key_tile = at_tile(keys, key_pages, tile, PAGE, N)
        v, value_tile = at_tile(values, value_pages, tile, PAGE, N)
        key_words = load_codes(k, shifts, key_tile, remaining, KF, N, 1, 4)
        value_words = load_codes(v, shifts, value_tile, remaining, VF, N // 2, 2, 8)
        key_gain = load_gains(k, key_tile, remaining, KF, N)
        value_gain = load_gains(v, value_tile, remaining, VF, N)
        qk = tl.zeros([N, M], tl.float32)
        for j in tl.static_range(len(constants)):
            weights, means, turns = constants[j]
            if RELOAD:
                weights = key_weights(key_operands[0], key_head, j, KF, STYLE, WIDTH, D, E, VOLATILE=True)
            r1, r2 = rotated_keys(key_words, key_gain, weights, means, turns, KF, STYLE, N, E, HALF_SUMS, ASSEMBLY)
            qk = tl.dot(r1, queries[2 * j].to(tl.float16), qk)
            qk = tl.dot(r2, queries[2 * j + 1].to(tl.float16), qk)
        queries = turned(queries, steps, STYLE)
        qk = tl.reshape(qk * query_scale[None, :], [B, 16, M])
        within = (token + (tile * N - oldest)).to(tl.uint32, bitcast=True)  # a token before the oldest is large
        qk = tl.where(within < seen, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
        m_finite = tl.where(m_ij == float("-inf"), 0.0, m_ij)  # a warp may have no token that is seen
        p = tl.exp2(qk - m_finite[:, None, :])
        alpha = tl.exp2(m_i - m_finite)
        l_i = l_i * alpha[:, None, :] + tl.sum(tl.reshape(p, [B, 2, 8, M]), axis=1)
        if VF.gain:  # noqa: SIM108
            p = p * tl.reshape(value_gain.to(tl.float32) * P_FACTOR, [B, 16])[:, :, None]
        else:
            p = p * P_FACTOR
        new = ()
        for i in tl.static_range(len(VC)):
            z = value_codes(value_words, VF, VC[i][0], VC[i][1], B)
            new = new + (tl.dot(z, p.to(tl.float16), sums[i] * alpha[:, None, :]),)
        sums = new
        m_i = m_ij
    m = tl.max(m_i, axis=0)
    factor = tl.exp2(m_i - tl.where(m == float("-inf"), 0.0, m)[None, :])
    total = tl.sum(tl.sum(l_i, axis=1) * factor, axis=0)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    merged = ()
    for i in tl.static_range(len(VC)):
        x = tl.sum(sums[i] * factor[:, None, :], axis=0) * (inverse * (1.0 / P_FACTOR))[None, :]
        merged = merged + (tl.trans(x),)
    if last > first:
        out = split_output(partial, first_query, D, M)
        store_values(merged, out, value_operands, value_head, VF, D, GROUP, M, PRECISION)
    member = tl.arange(0, M)
    tl.store(split_output(logsum, first_query, 1, M), m + tl.log2(total), mask=member < GROUP)


@triton.jit
def store_values(
    sums, out, operands, head, F: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store S' sums + mean at the pointers `out` [M]. sums [M, components] of each chunk of fields."""
    VC: tl.constexpr = chunks(F)
    C: tl.constexpr = F.components
    member = tl.arange(0, M)[:, None]
    for begin in tl.range(0, D, OUTPUT_CHANNELS):
        channel = begin + tl.arange(0, OUTPUT_CHANNELS)
        inside = (channel < D)[None, :]
        x = tl.load(operands[1] + head * D + channel[None, :], mask=inside, other=0.0)
        x = tl.broadcast_to(x, [M, OUTPUT_CHANNELS])
        for i in tl.static_range(len(VC)):
            component = 8 * VC[i][0] + tl.arange(0, 8 * VC[i][1])
            at = operands[0] + (head * C + component)[:, None] * D + channel[None, :]
            x = tl.dot(sums[i], tl.load(at, mask=inside, other=0.0), x, input_precision=PRECISION)
        tl.store(out[:, None] + channel[None, :], x, mask=(member < GROUP) & inside)
