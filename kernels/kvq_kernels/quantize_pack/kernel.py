"""One program packs all channels of a run of tokens: first what its groups have (scale, zero-point, signs), then, plane
by plane, the codes, for which it reads numbers and scales again while they are near.

Scales and zero-points are written as integers: rounding to bfloat16 is then one rule for the compiler and the
interpreter. A whole number n in [-2^22, 2^22] is read off the lowest bits of n + 1.5 2^23, which also rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)


@triton.jit
def quantize_kernel(
    x,
    codes,  # int32 [B, H, T, words]
    scale,  # int16, of scales
    zero,  # integers, of zero-points; of words of signs
    word,
    strides,  # of x: row, head, token
    tokens,
    D: tl.constexpr,
    G: tl.constexpr,  # numbers of a group
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,  # groups of tokens of a channel, else of channels of a token
    SIGN: tl.constexpr,  # of symmetric groups: "extra", "inside"; "none": there are only asymmetric ones
    HYBRID: tl.constexpr,
    SCALE: tl.constexpr,  # types
    ZERO: tl.constexpr,
    FUSED: tl.constexpr,  # there is a product and sum that is rounded once: not in the interpreter
    R: tl.constexpr,  # tokens; of a group where groups are of tokens
    C: tl.constexpr,  # columns that are looked at together
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = row.to(tl.int64) * tl.num_programs(1) + head
    x += row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    token = block * R + tl.arange(0, R)
    seen = token < tokens
    numbers = x + token.to(tl.int64)[:, None] * strides[2]
    if CHANNEL:
        base = (index * (tokens // G) + block) * D
        for first in tl.range(0, D, C):
            channel = first + tl.arange(0, C)
            tile = tl.load(numbers + channel[None, :], mask=channel[None, :] < D, other=0.0).to(tl.float32)
            place = base + channel
            parts = (scale + place, zero + place, word + place)
            _groups(tile, 0, C, parts, channel < D, G, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
    else:
        base = index * tokens * (D // G)
        for group in tl.range(0, D // G):
            channel = group * G + tl.arange(0, G)
            tile = tl.load(numbers + channel[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
            place = base + token * (D // G) + group
            parts = (scale + place, zero + place, word + place)
            _groups(tile, 1, R, parts, seen, G, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
    tl.debug_barrier()
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    WORDS: tl.constexpr = (D * LOW + 31) // 32
    HIGH: tl.constexpr = (D + 31) // 32 if BITS == 3 else 0
    rows = codes + (index * tokens + token)[:, None] * (WORDS + HIGH)
    sides = (scale + base, zero + base, word + base)
    _pack(numbers, rows, sides, token, seen, LOW, 0, WORDS, D, G, BITS, CHANNEL, SIGN, HYBRID, SCALE, ZERO, FUSED, R, C)
    if BITS == 3:
        rows += WORDS
        _pack(
            numbers, rows, sides, token, seen, 1, 2, HIGH, D, G, BITS, CHANNEL, SIGN, HYBRID, SCALE, ZERO, FUSED, R, C
        )


@triton.jit
def _groups(
    tile, A: tl.constexpr, N: tl.constexpr, parts, seen, G: tl.constexpr, BITS: tl.constexpr,
    SIGN: tl.constexpr, HYBRID: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Write the parts of N groups; their numbers lie along axis A of the tile. parts: their pointers [N]."""
    scale, zero, word = parts
    MOST: tl.constexpr = 2**BITS - 1
    if SIGN == "none" or HYBRID:
        low, high = tl.min(tile, axis=A) + 0.0, tl.max(tile, axis=A) + 0.0  # minus zero becomes zero
        z_bits, z = to_bits(low, ZERO)
        s_bits, s = to_bits(tl.div_rn(high - low, 1.0 * MOST), SCALE)
    if SIGN == "none":
        tl.store(zero, z_bits, mask=seen)
    else:
        LARGEST: tl.constexpr = MOST if SIGN == "extra" else 2 ** (BITS - 1) - 1
        own_bits, own = to_bits(tl.div_rn(tl.max(tl.abs(tile), axis=A), 1.0 * LARGEST), SCALE)
        if SIGN == "extra":
            WORD: tl.constexpr = word.dtype.element_ty
            place = tl.expand_dims(tl.arange(0, G), 1 - A).to(WORD if G == 64 else tl.int32)
            negative = ((tile.to(tl.int32, bitcast=True) >> 31) & 1).to(place.dtype)
            signs = tl.sum(negative << place, axis=A).to(WORD)
        if HYBRID:
            s_all, z_all, own_all = tl.expand_dims(s, A), tl.expand_dims(z, A), tl.expand_dims(own, A)
            target = tl.abs(tile) if SIGN == "extra" else tile
            least: tl.constexpr = 0 if SIGN == "extra" else -LARGEST
            error = _steps(tile - z_all, s_all, 0.0, 1.0 * MOST, FUSED) * s_all + z_all - tile
            own_error = _steps(target, own_all, 1.0 * least, 1.0 * LARGEST, FUSED) * own_all - target
            asymmetric = _is_less(error, own_error, A, N, G)
            s_bits = tl.where(asymmetric, s_bits ^ -32768, own_bits)
            if SIGN == "extra":
                signs = tl.where(asymmetric, z_bits, signs)
            else:
                tl.store(zero, z_bits, mask=seen)
        else:
            s_bits = own_bits
        if SIGN == "extra":
            tl.store(word, signs, mask=seen)
    tl.store(scale, s_bits, mask=seen)


@triton.jit
def _is_less(error, other, A: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """Whether the sum of squares of each group of `error` is less than that of `other`.

    Sums in any order tell, unless they nearly agree; only then is the order kept to that all devices agree on.
    """
    sums, others = tl.sum(error * error, axis=A), tl.sum(other * other, axis=A)
    less = sums < others
    close = (tl.abs(sums - others) <= 1e-4 * (sums + others)) & (sums + others > 0.0)
    if tl.max(close.to(tl.int32), axis=0) > 0:
        less = _sum_of_squares(error, A, N, G) < _sum_of_squares(other, A, N, G)
    return less


@triton.jit
def _sum_of_squares(error, A: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    """Of each group, in an order that no layout changes: neighbours, then neighbouring sums, ..."""
    squares = error * error
    if A == 0:
        squares = tl.trans(squares)
    for i in tl.static_range(G.bit_length() - 1):
        even, odd = tl.split(tl.reshape(squares, (N, G >> (i + 1), 2)))
        squares = even + odd
    return tl.reshape(squares, (N,))


@triton.jit
def _pack(
    numbers, rows, sides, token, seen, PART: tl.constexpr, TAKEN: tl.constexpr, WORDS: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, SIGN: tl.constexpr, HYBRID: tl.constexpr,
    SCALE: tl.constexpr, ZERO: tl.constexpr, FUSED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the WORDS words of each token that hold bits [TAKEN, TAKEN + PART) of its codes."""
    scale, zero, word = sides
    W: tl.constexpr = min(C, triton.next_power_of_2(WORDS))
    for first in tl.range(0, WORDS, W):
        column = first + tl.arange(0, W)
        packed = tl.zeros([R, W], tl.int32)
        for plane in tl.static_range(32 // PART):
            channel = (plane * WORDS + column)[None, :]
            mine = (column < WORDS)[None, :] & (channel < D)
            if CHANNEL:
                place, each = channel, mine
            elif G % WORDS == 0:  # a plane has one group
                place, each = token[:, None] * (D // G) + plane * WORDS // G, seen[:, None]
            else:
                place, each = token[:, None] * (D // G) + channel // G, mine & seen[:, None]
            tile = tl.load(numbers + channel, mask=mine & seen[:, None], other=0.0).to(tl.float32)
            bits = tl.load(scale + place, mask=each, other=0)
            z_bits = bits
            if SIGN == "none" or (HYBRID and SIGN == "inside"):
                z_bits = tl.load(zero + place, mask=each, other=0)
            elif HYBRID:
                z_bits = tl.load(word + place, mask=each, other=0)
            code = _codes(tile, bits, z_bits, BITS, SIGN, HYBRID, SCALE, ZERO, FUSED)
            packed |= tl.where(mine, ((code >> TAKEN) & ((1 << PART) - 1)) << (PART * plane), 0)
        tl.store(rows + column[None, :], packed, mask=seen[:, None] & (column < WORDS)[None, :])


@triton.jit
def _codes(
    tile, bits, z_bits, BITS: tl.constexpr, SIGN: tl.constexpr, HYBRID: tl.constexpr, SCALE: tl.constexpr,
    ZERO: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Integers whose lowest BITS bits are the codes."""
    MOST: tl.constexpr = 2**BITS - 1
    LEVEL: tl.constexpr = 2 ** (BITS - 1) - 1
    s = from_bits(bits & 32767, SCALE)
    if SIGN == "none":
        return _whole(_steps(tile - from_bits(z_bits, ZERO), s, 0.0, 1.0 * MOST, FUSED))
    elif not HYBRID:
        if SIGN == "extra":
            return _whole(_steps(tl.abs(tile), s, 0.0, 1.0 * MOST, FUSED))
        else:
            return _whole(_steps(tile, s, -1.0 * LEVEL, 1.0 * LEVEL, FUSED)) + LEVEL
    else:
        asymmetric = bits < 0
        z_bits = tl.where(asymmetric, z_bits, 0)  # of a symmetric group: its signs
        distance = tile - from_bits(z_bits, ZERO)
        if SIGN == "extra":
            return _whole(_steps(tl.where(asymmetric, distance, tl.abs(tile)), s, 0.0, 1.0 * MOST, FUSED))
        else:
            level = tl.where(asymmetric, 0, LEVEL)
            least, most = tl.where(asymmetric, 0.0, -1.0 * LEVEL), tl.where(asymmetric, 1.0 * MOST, 1.0 * LEVEL)
            return _whole(_steps(tl.where(asymmetric, distance, tile), s, least, most, FUSED)) + level


@triton.jit
def _steps(distance, scale, least, most, FUSED: tl.constexpr):
    """Distances in steps of the scale, whole numbers in [least, most]; 0 where the scale is 0.

    FUSED: an approximate reciprocal, improved, is the rounded one for every scale of 8 or 11 significant bits above
    2^-100; an approximate quotient by it, improved, is then the rounded one (Markstein). A fifth of a division.
    """
    if FUSED:
        inverse = 1.0 / scale
        inverse = tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)
        inverse = tl.broadcast_to(tl.where(scale == 0.0, 0.0, inverse), distance.shape)
        quotient = distance * inverse
        rest = tl.fma(-quotient, tl.broadcast_to(scale, distance.shape), distance)
        quotient = tl.fma(rest, inverse, quotient)
    else:
        quotient = tl.div_rn(distance, tl.where(scale == 0.0, float("inf"), scale))
    return (tl.minimum(tl.maximum(quotient, least), most) + ROUND) - ROUND


@triton.jit
def _whole(number):
    """Integers whose lowest bits are those of whole float32 numbers."""
    return (number + ROUND).to(tl.int32, bitcast=True)


@triton.jit
def to_bits(x, kind: tl.constexpr):
    """float32 numbers rounded to a type, to nearest, ties to even: the bits, and the rounded numbers as float32."""
    if kind == tl.bfloat16:
        whole = x.to(tl.int32, bitcast=True)
        whole = (whole + 32767 + ((whole >> 16) & 1)) & -65536
        return (whole >> 16).to(tl.int16), whole.to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        half = x.to(tl.float16)
        return half.to(tl.int16, bitcast=True), half.to(tl.float32)
    elif kind == tl.float32:
        return x.to(tl.int32, bitcast=True), x
    else:
        return x.to(tl.float64).to(tl.int64, bitcast=True), x


@triton.jit
def from_bits(bits, kind: tl.constexpr):
    """The float32 numbers of `to_bits`."""
    if kind == tl.bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(kind, bitcast=True).to(tl.float32)
