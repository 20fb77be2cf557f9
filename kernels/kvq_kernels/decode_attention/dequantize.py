"""Dequantization of any element (token, channel) of a side: every storage format, with gather loads; slow.

The tail of a row is read like this, and tiles that no faster path fits (`uniform.py`, `vector_codebook.py`,
`scalar_codebook.py`). In a kernel a side is a tuple of pointers:

    0 codes or dense numbers, 1 scale or centroids, 2 zero or mean, 3 sign or std, 4 token_scale, 5 token_zero,
    6 sinks, 7 ring, 8 norm, 9 outliers' index, 10 outliers' value, 11 outliers' start

Missing tensors are replaced by the codes. Offsets within a row and head are 32-bit, bases 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.paging import at_tokens
from kvq_kernels.planar import low_bits

#: 2^24: undoes the subnormal bitcast.
SUBNORMAL_SCALE = tl.constexpr(16777216.0)


@triton.jit
def at_head(side, strides, S: tl.constexpr, row, head):
    """The side's pointers advanced to one row and head. strides: (row, head) of codes, scale, token_scale, sinks, ring,
    norm and outliers, and of outliers' start for the row."""
    return at_stored_head(side, strides, S, row, head, head)


@triton.jit
def at_stored_head(side, strides, S: tl.constexpr, row, head, stored):
    """`at_head` for a kv head that is number `stored` of the heads that this side's codes hold."""
    r, h = row.to(tl.int64), stored.to(tl.int64)
    group = r * strides[2] + h * strides[3]
    token = r * strides[4]
    codes = side[0] + r * strides[0] + h * strides[1]
    book = 0 * h
    if S.kind == "codebook":
        group = h * S.dim
        size: tl.constexpr = S.dim // S.book_channels * S.entries * S.tokens * S.channels
        book = 0 * h if S.shared_heads else h * size
    else:
        book = group
    first, second, third = side[1] + book, side[2] + group, side[3] + group
    scale, zero = side[4] + token, side[5] + token
    h = head.to(tl.int64)
    sinks = side[6] + r * strides[6] + h * strides[7]
    ring = side[7] + r * strides[8] + h * strides[9]
    norm = side[8] + r * strides[10] + h * strides[11]
    sparse = r * strides[12] + h * strides[13]
    index, value, start = side[9] + sparse, side[10] + sparse, side[11] + r * strides[14] + h
    return (codes, first, second, third, scale, zero, sinks, ring, norm, index, value, start)


@triton.jit
def subnormal_to_float(codes):
    """Integers below 1024 as float32, without a conversion: their bits as float16 are subnormal, code / 2^24. Bit 15 is
    the sign."""
    return codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * SUBNORMAL_SCALE


@triton.jit
def load_code(codes, row, column, W: tl.constexpr, ROW: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, mask):
    """Code `column` of row `row` (broadcast) in planar words, see `Uniform.codes`; 0 where not `mask`: a shift by 32 or
    more is undefined."""
    LOW: tl.constexpr = low_bits(BITS)
    word = tl.load(codes + (row * ROW + column % W), mask=mask, other=0)
    code = (word >> (LOW * (column // W) & 31)) & ((1 << LOW) - 1)
    if BITS == 3:
        HIGH: tl.constexpr = (COUNT + 31) // 32
        word = tl.load(codes + row * ROW + W + column % HIGH, mask=mask, other=0)
        code = code | (((word >> (column // HIGH & 31)) & 1) << 2)
    return code


@triton.jit
def dequantize(side, S: tl.constexpr, token, channel, mask):
    """float32 [tokens, channels]: packed tokens `token` [tokens, 1], channels `channel` [1, channels], dequantized."""
    KIND: tl.constexpr = S.kind
    if KIND == "dense":
        return tl.load(side[0] + token * S.dim + channel, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "uniform":
        return _uniform(side, S, token, channel, mask)
    else:
        return _codebook(side, S, token, channel, mask)


@triton.jit
def _uniform(side, S: tl.constexpr, token, channel, mask):
    """`dequantize` of uniform codes: q s + z, (q - level) s, or per group of a hybrid either."""
    D: tl.constexpr = S.dim
    G: tl.constexpr = S.group
    code = load_code(side[0], token, channel, S.words, S.row, D, S.bits, mask)
    if S.axis == "channel":
        offset = (token // G) * D + channel
        member = token % G
    else:
        offset = token * (D // G) + channel // G
        member = channel % G
    raw = tl.load(side[1] + offset, mask=mask, other=0.0)
    s = raw.to(tl.float32)
    if S.hybrid:
        asymmetric = raw.to(tl.int16, bitcast=True) < 0  # the sign bit: a constant group's scale is minus zero
        s = tl.abs(s)
    if S.sign_bits > 0:
        word = tl.load(side[3] + offset, mask=mask, other=0)
        if S.hybrid:
            z = tl.where(asymmetric, word.to(tl.float32, bitcast=True), 0.0)
            word = tl.where(asymmetric, 0, word)
            return subnormal_to_float(code | _sign(word, member)) * s + z
        return subnormal_to_float(code | _sign(word, member)) * s
    elif S.has_zero:
        z = tl.load(side[2] + offset, mask=mask, other=0.0).to(tl.float32)
        return subnormal_to_float(code) * s + z
    else:
        return (subnormal_to_float(code) - S.level) * s


@triton.jit
def _sign(word, member):
    """Bit `member` of the group's word, as the sign bit of a float16 number."""
    return ((word >> member.to(word.dtype)) & 1).to(tl.int32) << 15


@triton.jit
def _codebook(side, S: tl.constexpr, token, channel, mask):
    """`dequantize` of codebook codes: centroid std + mean, then the token's scale and zero-point."""
    D: tl.constexpr = S.dim
    L: tl.constexpr = S.tokens
    C: tl.constexpr = S.channels
    N: tl.constexpr = S.entries
    if S.bits == 8:
        code = tl.load(side[0] + ((token // L) * (D // C) + channel // C), mask=mask, other=0).to(tl.int32)
    else:
        code = load_code(side[0], token // L, channel // C, S.words, S.row, D // C, S.bits, mask)
    entry = ((channel // S.book_channels) * N + code) * (L * C)
    x = tl.load(side[1] + (entry + (token % L) * C + channel % C), mask=mask, other=0.0).to(tl.float32)
    if S.has_std:
        x = x * tl.load(side[3] + channel, mask=channel < D, other=0.0)
    if S.has_zero:
        x += tl.load(side[2] + channel, mask=channel < D, other=0.0)
    if S.token_scaled:
        x *= tl.load(side[4] + token, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(side[5] + token, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def load_cached(side, S: tl.constexpr, SINKS: tl.constexpr, ring_size, count, token, channel, mask):
    """float32 [tokens, channels] of the row's tokens `token`, wherever they are cached: sinks, packed or ring."""
    D: tl.constexpr = S.dim
    index = token - SINKS
    packed = mask & (index >= 0) & (index < count)
    stored, within = at_tokens(side, S, index, (index >= 0) & (index < count))
    x = dequantize(stored, S, within, channel, packed)
    if S.outliers > 0:
        x = _with_outliers(x, stored, S, within, channel, packed)
    x = tl.where(packed, x, 0.0)
    exact = tl.zeros(x.shape, tl.float32)
    if SINKS > 0:
        exact += tl.load(side[6] + token * D + channel, mask=mask & (index < 0), other=0.0).to(tl.float32)
    if S.ring:
        recent = mask & (index >= 0) & (index >= count)
        exact += tl.load(side[7] + (index % ring_size) * D + channel, mask=recent, other=0.0).to(tl.float32)
    if S.normed:
        exact /= tl.load(side[8] + channel, mask=channel < D, other=1.0)
    return x + exact


@triton.jit
def _with_outliers(x, side, S: tl.constexpr, token, channel, mask):
    """x with outliers put in: every slot of a block's list is compared with every element."""
    BLOCK: tl.constexpr = S.outlier_block
    CAPACITY: tl.constexpr = S.outliers
    block = token // BLOCK
    position = (token % BLOCK) * S.dim + channel
    first = block * CAPACITY
    slots, slot_mask = CAPACITY, mask
    if S.pooled_heads > 0:
        start = side[11] + block * (S.pooled_heads + 1)
        begin = tl.load(start, mask=mask, other=0)
        count = tl.load(start + 1, mask=mask, other=0) - begin
        first += begin
        slots = tl.max(tl.max(count, axis=1), axis=0)
    for slot in tl.range(0, slots, num_stages=1):
        if S.pooled_heads > 0:
            slot_mask = slot < count  # count is 0 where not `mask`
        index = tl.load(side[9] + first + slot, mask=slot_mask, other=-1).to(tl.int32)
        x = tl.where(index == position, tl.load(side[10] + first + slot, mask=slot_mask, other=0.0).to(tl.float32), x)
    return x
