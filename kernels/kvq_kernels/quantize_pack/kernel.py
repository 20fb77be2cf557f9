"""Quantization and packing of one block of tokens per program, in two passes over its numbers.

First the statistics of each group (scale, zero-point, signs), then the codes plane by plane, for which numbers and
scales are read again from cache. `launch.py` passes the arguments; `squat_quantize` uses `to_bits`, too.

Scales and zero-points are stored as integers, so that rounding to bfloat16 is the same in the compiler and the
interpreter. A whole number n in [-2^22, 2^22] is in the lowest bits of n + 1.5 2^23; that addition also rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.planar import low_bits

#: 1.5 2^23: added to a float32 of either sign, it rounds to the nearest whole number, ties to even.
ROUND_SIGNED = tl.constexpr(12582912.0)
#: Largest numbers of 16 bits.
FLOAT16_MAX, BFLOAT16_MAX = tl.constexpr(65504.0), tl.constexpr(3.3895313892515355e38)


@triton.jit
def quantize_kernel(
    x,  # [B, H, T, D]
    codes,  # int32 [B, H, T, words]
    scale,  # bits of scales, int16
    zero,  # bits of zero-points, integers
    sign,  # words of sign bits; in a hybrid, zero-points of asymmetric groups
    strides,  # of row, head, token in x
    tokens,
    D: tl.constexpr,
    G: tl.constexpr,  # numbers of a group
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,  # a group is G tokens of a channel, else G channels of a token
    SIGN: tl.constexpr,  # of symmetric groups: "extra" or "inside", see `Layout`; "none": asymmetric groups alone
    HYBRID: tl.constexpr,
    SCALE: tl.constexpr,  # types of scales and zero-points
    ZERO: tl.constexpr,
    FUSED: tl.constexpr,  # fused multiply-add exists: not in the interpreter
    R: tl.constexpr,  # tokens of a block; with CHANNEL a group's
    C: tl.constexpr,  # channels or words at once
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = row.to(tl.int64) * tl.num_programs(1) + head
    x += row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    token = block * R + tl.arange(0, R)
    mask = token < tokens
    token_pointers = x + token.to(tl.int64)[:, None] * strides[2]
    if CHANNEL:
        base = (index * (tokens // G) + block) * D
        for first in tl.range(0, D, C):
            channel = first + tl.arange(0, C)
            tile = tl.load(token_pointers + channel[None, :], mask=channel[None, :] < D, other=0.0).to(tl.float32)
            offset = base + channel
            pointers = (scale + offset, zero + offset, sign + offset)
            _groups(tile, 0, C, pointers, channel < D, G, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
    else:
        base = index * tokens * (D // G)
        for group in tl.range(0, D // G):
            channel = group * G + tl.arange(0, G)
            tile = tl.load(token_pointers + channel[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
            offset = base + token * (D // G) + group
            pointers = (scale + offset, zero + offset, sign + offset)
            _groups(tile, 1, R, pointers, mask, G, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
    tl.debug_barrier()
    LOW: tl.constexpr = low_bits(BITS)
    WORDS: tl.constexpr = (D * LOW + 31) // 32
    HIGH: tl.constexpr = (D + 31) // 32 if BITS == 3 else 0
    rows = codes + (index * tokens + token)[:, None] * (WORDS + HIGH)
    pointers = (scale + base, zero + base, sign + base)
    _pack(
        token_pointers, rows, pointers, token, mask, LOW, 0, WORDS,
        D, G, BITS, CHANNEL, SIGN, HYBRID, SCALE, ZERO, FUSED, R, C,
    )  # fmt: skip
    if BITS == 3:
        rows += WORDS
        _pack(
            token_pointers, rows, pointers, token, mask, 1, 2, HIGH,
            D, G, BITS, CHANNEL, SIGN, HYBRID, SCALE, ZERO, FUSED, R, C,
        )  # fmt: skip


@triton.jit
def _groups(
    tile, A: tl.constexpr, N: tl.constexpr, pointers, mask, G: tl.constexpr, BITS: tl.constexpr,
    SIGN: tl.constexpr, HYBRID: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Store scale, zero-point and signs of N groups along axis A of the tile, at their pointers [N]."""
    scale, zero, sign = pointers
    LEVELS: tl.constexpr = 2**BITS - 1
    if SIGN == "none" or HYBRID:
        low, high = tl.min(tile, axis=A) + 0.0, tl.max(tile, axis=A) + 0.0  # minus zero becomes zero
        z_bits, z = to_bits(low, ZERO)
        s_bits, s = to_bits(tl.div_rn(high - low, 1.0 * LEVELS), SCALE)
    if SIGN == "none":
        tl.store(zero, z_bits, mask=mask)
    else:
        MAX_CODE: tl.constexpr = LEVELS if SIGN == "extra" else 2 ** (BITS - 1) - 1
        s_sym_bits, s_sym = to_bits(tl.div_rn(tl.max(tl.abs(tile), axis=A), 1.0 * MAX_CODE), SCALE)
        if SIGN == "extra":
            WORD: tl.constexpr = sign.dtype.element_ty
            offset = tl.expand_dims(tl.arange(0, G), 1 - A).to(WORD if G == 64 else tl.int32)
            negative = ((tile.to(tl.int32, bitcast=True) >> 31) & 1).to(offset.dtype)
            signs = tl.sum(negative << offset, axis=A).to(WORD)
        if HYBRID:
            s_all, z_all, s_sym_all = tl.expand_dims(s, A), tl.expand_dims(z, A), tl.expand_dims(s_sym, A)
            magnitude = tl.abs(tile)
            error = _quantized(tile - z_all, s_all, 0.0, 1.0 * LEVELS, FUSED) * s_all + z_all - tile
            error_sym = _quantized(magnitude, s_sym_all, 0.0, 1.0 * MAX_CODE, FUSED) * s_sym_all - magnitude
            asymmetric = _less_error(error, error_sym, A, N, G)
            s_bits = tl.where(asymmetric, s_bits ^ -32768, s_sym_bits)
            signs = tl.where(asymmetric, z_bits, signs)
        else:
            s_bits = s_sym_bits
        if SIGN == "extra":
            tl.store(sign, signs, mask=mask)
    tl.store(scale, s_bits, mask=mask)


@triton.jit
def _less_error(error, other_error, A: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """Whether each group's sum of squared `error` is less than that of `other_error`.

    Sums in any order decide it unless they nearly agree; then they are added in the order of the reference.
    """
    sums, other_sums = tl.sum(error * error, axis=A), tl.sum(other_error * other_error, axis=A)
    less = sums < other_sums
    close = (tl.abs(sums - other_sums) <= 1e-4 * (sums + other_sums)) & (sums + other_sums > 0.0)
    if tl.max(close.to(tl.int32), axis=0) > 0:
        less = _sum_of_squares(error, A, N, G) < _sum_of_squares(other_error, A, N, G)
    return less


@triton.jit
def _sum_of_squares(error, A: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """Sum of squares of each group in a fixed order: neighbours, then neighbouring sums, ..."""
    squares = error * error
    if A == 0:
        squares = tl.trans(squares)
    for i in tl.static_range(G.bit_length() - 1):
        even, odd = tl.split(tl.reshape(squares, (N, G >> (i + 1), 2)))
        squares = even + odd
    return tl.reshape(squares, (N,))


@triton.jit
def _pack(
    token_pointers, rows, pointers, token, mask, PART_BITS: tl.constexpr, SHIFT: tl.constexpr, WORDS: tl.constexpr, D:
    tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, SIGN: tl.constexpr, HYBRID: tl.constexpr,
    SCALE: tl.constexpr, ZERO: tl.constexpr, FUSED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the WORDS words of each token that hold bits [SHIFT, SHIFT + PART_BITS) of its codes."""
    scale, zero, sign = pointers
    WORDS_AT_ONCE: tl.constexpr = min(C, triton.next_power_of_2(WORDS))
    for first in tl.range(0, WORDS, WORDS_AT_ONCE):
        word = first + tl.arange(0, WORDS_AT_ONCE)
        packed = tl.zeros([R, WORDS_AT_ONCE], tl.int32)
        for plane in tl.static_range(32 // PART_BITS):
            channel = (plane * WORDS + word)[None, :]
            channel_mask = (word < WORDS)[None, :] & (channel < D)
            if CHANNEL:
                offset, group_mask = channel, channel_mask
            elif G % WORDS == 0:  # a plane has one group
                offset, group_mask = token[:, None] * (D // G) + plane * WORDS // G, mask[:, None]
            else:
                offset, group_mask = token[:, None] * (D // G) + channel // G, channel_mask & mask[:, None]
            tile = tl.load(token_pointers + channel, mask=channel_mask & mask[:, None], other=0.0).to(tl.float32)
            bits = tl.load(scale + offset, mask=group_mask, other=0)
            z_bits = bits
            if SIGN == "none":
                z_bits = tl.load(zero + offset, mask=group_mask, other=0)
            elif HYBRID:
                z_bits = tl.load(sign + offset, mask=group_mask, other=0)
            code = _codes(tile, bits, z_bits, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
            packed |= tl.where(channel_mask, ((code >> SHIFT) & ((1 << PART_BITS) - 1)) << (PART_BITS * plane), 0)
        tl.store(rows + word[None, :], packed, mask=mask[:, None] & (word < WORDS)[None, :])


@triton.jit
def _codes(
    tile, bits, z_bits, BITS: tl.constexpr, SIGN: tl.constexpr, HYBRID: tl.constexpr, SCALE: tl.constexpr,
    ZERO: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Codes, in the lowest BITS bits of integers."""
    LEVELS: tl.constexpr = 2**BITS - 1
    LEVEL: tl.constexpr = 2 ** (BITS - 1) - 1
    s = from_bits(bits & 32767, SCALE)
    if SIGN == "none":
        return _to_int(_quantized(tile - from_bits(z_bits, ZERO), s, 0.0, 1.0 * LEVELS, FUSED))
    elif not HYBRID:
        if SIGN == "extra":
            return _to_int(_quantized(tl.abs(tile), s, 0.0, 1.0 * LEVELS, FUSED))
        else:
            return _to_int(_quantized(tile, s, -1.0 * LEVEL, 1.0 * LEVEL, FUSED)) + LEVEL
    else:
        asymmetric = bits < 0
        z_bits = tl.where(asymmetric, z_bits, 0)  # symmetric: signs, no zero-point
        distance = tile - from_bits(z_bits, ZERO)
        return _to_int(_quantized(tl.where(asymmetric, distance, tl.abs(tile)), s, 0.0, 1.0 * LEVELS, FUSED))


@triton.jit
def _quantized(distance, scale, lower, upper, FUSED: tl.constexpr):
    """clip(round(distance / scale), lower, upper), as float32; 0 where the scale is 0.

    FUSED: one Newton step makes an approximate reciprocal correctly rounded for every scale of 8 or 11 significant bits
    above 2^-100, another one then the quotient (Markstein): a fifth of the cost of a division.
    """
    if FUSED:
        inverse = 1.0 / scale
        inverse = tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)
        inverse = tl.broadcast_to(tl.where(scale == 0.0, 0.0, inverse), distance.shape)
        quotient = distance * inverse
        residual = tl.fma(-quotient, tl.broadcast_to(scale, distance.shape), distance)
        quotient = tl.fma(residual, inverse, quotient)
    else:
        quotient = tl.div_rn(distance, tl.where(scale == 0.0, float("inf"), scale))
    return (tl.minimum(tl.maximum(quotient, lower), upper) + ROUND_SIGNED) - ROUND_SIGNED


@triton.jit
def _to_int(number):
    """Integers with the lowest bits of whole float32 numbers."""
    return (number + ROUND_SIGNED).to(tl.int32, bitcast=True)


@triton.jit
def to_bits(x, kind: tl.constexpr):
    """(bits, rounded numbers as float32) of float32 numbers rounded to a type, to nearest, ties to even; those out of
    its range become its largest or least: an infinite scale would lose a whole group."""
    if kind == tl.bfloat16:
        whole = tl.minimum(tl.maximum(x, -BFLOAT16_MAX), BFLOAT16_MAX).to(tl.int32, bitcast=True)
        whole = (whole + 32767 + ((whole >> 16) & 1)) & -65536
        return (whole >> 16).to(tl.int16), whole.to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        half = tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)
        return half.to(tl.int16, bitcast=True), half.to(tl.float32)
    elif kind == tl.float32:
        return x.to(tl.int32, bitcast=True), x
    else:
        return x.to(tl.float64).to(tl.int64, bitcast=True), x


@triton.jit
def from_bits(bits, kind: tl.constexpr):
    """float32 numbers of their bits in a type; inverse of `to_bits`."""
    if kind == tl.bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(kind, bitcast=True).to(tl.float32)
