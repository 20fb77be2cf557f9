"""One number of a packed side at any (token, channel): right for every kind, fast for none.

The tail (sinks, recent tokens, what is left of a tile) is read so, and the main loop where no faster reading applies.
A side is the tuple (codes or numbers, scale or centroids, zero or mean, sign or std, token_scale, token_zero, sinks,
ring, norm, outliers' index, outliers' value, outliers' start), where the codes stand in for what there is not; offsets
within one row and head are 32-bit, the bases 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.spec import get, row_width


@triton.jit
def at_head(side, strides, S: tl.constexpr, row, head):
    """The side's pointers moved to one row and head. strides: of codes, scale, token_scale, sinks, ring, norm, outliers
    x row, head, and of outliers' start x row."""
    return at_stored_head(side, strides, S, row, head, head)


@triton.jit
def at_stored_head(side, strides, S: tl.constexpr, row, head, stored):
    """`at_head` for a head that is the `stored`-th of those that are stored as the side is."""
    r, h = row.to(tl.int64), stored.to(tl.int64)
    group = r * strides[2] + h * strides[3]
    token = r * strides[4]
    codes = side[0] + r * strides[0] + h * strides[1]
    book = 0 * h
    if get(S, "kind") == "codebook":
        group = h * get(S, "dim")
        size: tl.constexpr = (
            get(S, "dim") // get(S, "share") * get(S, "entries") * get(S, "tokens") * get(S, "channels")
        )
        book = 0 * h if get(S, "shared_heads") else h * size
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
def small_float(codes):
    """Integers below 1024 as float32, without a conversion: as float16 they are the subnormal numbers code / 2^24. With
    2^15 added they are negative."""
    return codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16777216.0


@triton.jit
def planar(codes, row, column, W: tl.constexpr, ROW: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, seen):
    """Code number `column` of row `row`, both broadcast; see `Uniform.codes`. Of columns that are not `seen` 0: to
    shift by 32 bits or more would leave what need not even be finite."""
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    word = tl.load(codes + (row * ROW + column % W), mask=seen, other=0)
    code = (word >> (LOW * (column // W) & 31)) & ((1 << LOW) - 1)
    if BITS == 3:
        HIGH: tl.constexpr = (COUNT + 31) // 32
        word = tl.load(codes + row * ROW + W + column % HIGH, mask=seen, other=0)
        code = code | (((word >> (column // HIGH & 31)) & 1) << 2)
    return code


@triton.jit
def number(side, S: tl.constexpr, token, channel, seen):
    """float32 [tokens, channels]: the decoded numbers of packed tokens `token` [tokens, 1], `channel` [1, channels]."""
    KIND: tl.constexpr = get(S, "kind")
    if KIND == "dense":
        return tl.load(side[0] + token * get(S, "dim") + channel, mask=seen, other=0.0).to(tl.float32)
    elif KIND == "uniform":
        return _uniform(side, S, token, channel, seen)
    else:
        return _codebook(side, S, token, channel, seen)


@triton.jit
def _uniform(side, S: tl.constexpr, token, channel, seen):
    D: tl.constexpr = get(S, "dim")
    G: tl.constexpr = get(S, "group")
    code = planar(side[0], token, channel, get(S, "words"), row_width(S), D, get(S, "bits"), seen)
    if get(S, "axis") == "channel":
        place = (token // G) * D + channel
        member = token % G
    else:
        place = token * (D // G) + channel // G
        member = channel % G
    raw = tl.load(side[1] + place, mask=seen, other=0.0)
    s = raw.to(tl.float32)
    if get(S, "hybrid"):
        asymmetric = raw.to(tl.int16, bitcast=True) < 0  # the sign bit: a constant group's scale is minus zero
        s = tl.abs(s)
    if get(S, "sign_bits") > 0:
        word = tl.load(side[3] + place, mask=seen, other=0)
        if get(S, "hybrid"):
            z = tl.where(asymmetric, word.to(tl.float32, bitcast=True), 0.0)
            word = tl.where(asymmetric, 0, word)
            return small_float(code | _sign(word, member)) * s + z
        return small_float(code | _sign(word, member)) * s
    elif get(S, "shifted"):
        z = tl.load(side[2] + place, mask=seen, other=0.0).to(tl.float32)
        if get(S, "hybrid"):
            z = tl.where(asymmetric, z, s * (-get(S, "level")))
        return small_float(code) * s + z
    else:
        return (small_float(code) - get(S, "level")) * s


@triton.jit
def _sign(word, member):
    """The sign bit of a float16 number, from bit `member` of its group's word."""
    return ((word >> member.to(word.dtype)) & 1).to(tl.int32) << 15


@triton.jit
def _codebook(side, S: tl.constexpr, token, channel, seen):
    D: tl.constexpr = get(S, "dim")
    L: tl.constexpr = get(S, "tokens")
    C: tl.constexpr = get(S, "channels")
    N: tl.constexpr = get(S, "entries")
    if get(S, "bits") == 8:
        code = tl.load(side[0] + ((token // L) * (D // C) + channel // C), mask=seen, other=0).to(tl.int32)
    else:
        code = planar(side[0], token // L, channel // C, get(S, "words"), row_width(S), D // C, get(S, "bits"), seen)
    entry = ((channel // get(S, "share")) * N + code) * (L * C)
    x = tl.load(side[1] + (entry + (token % L) * C + channel % C), mask=seen, other=0.0).to(tl.float32)
    if get(S, "scaled"):
        x = x * tl.load(side[3] + channel, mask=channel < D, other=0.0)
    if get(S, "shifted"):
        x += tl.load(side[2] + channel, mask=channel < D, other=0.0)
    if get(S, "token_scaled"):
        x *= tl.load(side[4] + token, mask=seen, other=0.0).to(tl.float32)
        x += tl.load(side[5] + token, mask=seen, other=0.0).to(tl.float32)
    return x


@triton.jit
def any_number(side, S: tl.constexpr, SINKS: tl.constexpr, slots, count, token, channel, seen):
    """`number` of token `token` of the row, wherever it is held: in the sinks, packed, or in the ring."""
    D: tl.constexpr = get(S, "dim")
    index = token - SINKS
    held = seen & (index >= 0) & (index < count)
    x = number(side, S, index, channel, held)
    if get(S, "slots") > 0:
        x = _with_outliers(x, side, S, index, channel, held)
    x = tl.where(held, x, 0.0)
    whole = tl.zeros(x.shape, tl.float32)
    if SINKS > 0:
        whole += tl.load(side[6] + token * D + channel, mask=seen & (index < 0), other=0.0).to(tl.float32)
    if get(S, "ring"):
        recent = seen & (index >= 0) & (index >= count)
        whole += tl.load(side[7] + (index % slots) * D + channel, mask=recent, other=0.0).to(tl.float32)
    if get(S, "normed"):
        whole /= tl.load(side[8] + channel, mask=channel < D, other=1.0)
    return x + whole


@triton.jit
def _with_outliers(x, side, S: tl.constexpr, token, channel, seen):
    """x with outliers put in: every slot of the tokens' blocks is compared with every number."""
    BLOCK: tl.constexpr = get(S, "block")
    SLOTS: tl.constexpr = get(S, "slots")
    block = token // BLOCK
    own = (token % BLOCK) * get(S, "dim") + channel
    first = block * SLOTS
    most, mine = SLOTS, seen
    if get(S, "together") > 0:
        start = side[11] + block * (get(S, "together") + 1)
        begin = tl.load(start, mask=seen, other=0)
        count = tl.load(start + 1, mask=seen, other=0) - begin
        first += begin
        most = tl.max(tl.max(count, axis=1), axis=0)
    for slot in tl.range(0, most, num_stages=1):
        if get(S, "together") > 0:
            mine = slot < count  # 0 of those that are not seen
        index = tl.load(side[9] + first + slot, mask=mine, other=-1).to(tl.int32)
        x = tl.where(index == own, tl.load(side[10] + first + slot, mask=mine, other=0.0).to(tl.float32), x)
    return x
