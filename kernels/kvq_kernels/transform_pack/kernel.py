"""Encoding and packing of a block of 16 tokens of one group of channels per program."""

from __future__ import annotations

import triton
import triton.language as tl

#: 1.5 2^52: added to a float64 of either sign, it rounds to the nearest whole number, ties to even.
ROUND_SIGNED = tl.constexpr(6755399441055744.0)
#: Channels whose loads are issued together.
AHEAD = tl.constexpr(8)


@triton.jit
def pack_kernel(
    x,  # [B, G, T, W]
    strides,  # of row, group, token in x
    constants,  # mean, to_grid, integers, step, center, largest, word, shift, high: see `PackTables`
    gain,  # scale, limits, gains: see `GainTables`
    limits,  # limit of x on its grid; limit, total and largest of the gain's
    parts,  # codes16, codes8, codes4, codes2, codes1: [B, G, T, 4 lanes, words] or [B, G, T / 16, 8, 8 lanes, words]
    index,  # uint8 [B, G, T]
    tokens,
    components,
    first,  # components whose largest square counts
    rate,  # bytes of a lane
    W: tl.constexpr,
    K: tl.constexpr,  # components, padded to a power of two
    VALUES: tl.constexpr,
    GAIN: tl.constexpr,
    T: tl.constexpr,  # tokens of a block
):
    block, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mean, to_grid, integers, step, center, largest, word, shift, high = constants
    token = block * T + tl.arange(0, T)
    component = tl.arange(0, K)
    mask = component < components
    x += row.to(tl.int64) * strides[0] + group.to(tl.int64) * strides[1] + token.to(tl.int64) * strides[2]
    mean += group * W
    to_grid += group * W
    rows = integers + group * W * components + component
    u = tl.zeros([T, K], tl.float64)
    for begin in tl.range(0, W, AHEAD):
        for i in tl.static_range(AHEAD):
            channel = begin + i
            number = (tl.load(x + channel).to(tl.float32) - tl.load(mean + channel)) * tl.load(to_grid + channel)
            numbers = _rounded(number, limits[0])
            u += numbers[:, None] * tl.load(rows + channel * components, mask=mask, other=0.0).to(tl.float64)[None, :]
    own = group * components + component
    z = (u * tl.load(step + own, mask=mask, other=0.0)[None, :]).to(tl.float32)
    head = row.to(tl.int64) * tl.num_programs(1) + group
    if GAIN:
        n, g = _gain(z, gain, own, mask, component < first, limits)
        tl.store(index + head * tokens + token, n.to(tl.uint8))
        z = tl.div_rn(z, tl.broadcast_to(g[:, None], z.shape))
    z = tl.minimum(tl.maximum(z + tl.load(center + own, mask=mask, other=0.0)[None, :], -1.0), 256.0)
    field = component // 8
    most = tl.load(largest + field, mask=mask, other=0).to(tl.int32)[None, :]
    code = tl.minimum(tl.maximum(_rounded(z, 256.0).to(tl.int32), 0), most)
    low, other = tl.load(shift + field, mask=mask, other=0).to(tl.int32), tl.load(high + field, mask=mask, other=0)
    half = (token % 2)[:, None] if VALUES else (component % 2)[None, :]
    bits = code << tl.where(half == 0, low[None, :], other[None, :])
    place = tl.load(word + field, mask=mask, other=-1)[None, :]
    unit = head * (tokens // T) + block
    done = 0
    for p in tl.static_range(5):
        # A lane's bytes are cut into pieces of 16, 8, 4, 2, 1 bytes by the binary digits of the rate.
        words = rate // 16 * 4 if p == 0 else rate // (16 >> p) % 2 * max(1, 4 >> p)
        for i in tl.range(0, words):
            _store(parts[p], tl.where(place == done + i, bits, 0), unit, words, i, VALUES, T, K)
        done += words


@triton.jit
def _rounded(number, limit):
    """Whole numbers, float64, within +-limit."""
    number = tl.minimum(tl.maximum(number.to(tl.float64), -limit), limit)
    return (number + ROUND_SIGNED) - ROUND_SIGNED


@triton.jit
def _gain(u, gain, own, mask, in_first, limits):
    """(n, g) of each token of `u` `[T, K]`."""
    scale, thresholds, gains = gain
    numbers = _rounded(u * tl.load(scale + own, mask=mask, other=0.0)[None, :], limits[1])
    squares = numbers * numbers
    # The larger of two quotients; the compiler must divide, not multiply by an inverse.
    square = tl.maximum(
        tl.sum(squares, axis=1) / limits[2], tl.max(tl.where(in_first[None, :], squares, 0.0), axis=1) / limits[3]
    )
    n = tl.zeros([u.shape[0]], tl.int32)
    for i in tl.static_range(8):
        further = n + (128 >> i)
        n = tl.where(tl.load(thresholds + further - 1) <= square, further, n)
    return n, tl.load(gains + n)


@triton.jit
def _store(part, bits, unit, words, i, VALUES: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Store word i of each lane: the union of its disjoint `bits` `[T, K]`."""
    if VALUES:
        pairs = tl.sum(tl.sum(tl.reshape(bits, (T // 2, 2, K // 8, 8)), axis=2), axis=1)
        lane = tl.arange(0, T // 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
        whole, number = pairs, unit * (T // 2 * 8) + lane
    else:
        whole = tl.sum(tl.sum(tl.reshape(bits, (T, K // 8, 4, 2)), axis=3), axis=1)
        lane = tl.arange(0, T)[:, None] * 4 + tl.arange(0, 4)[None, :]
        number = unit * (T * 4) + lane
    tl.store(part + number * words + i, whole.to(part.dtype.element_ty))
