"""Outliers of the main loop's tiles: what they are more than the codes say is added to scores and to sums.

A piece of `PIECE` outliers is added by products with matrices of ones and zeros that say where each belongs, in
float32: nothing is written twice, so that no order matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.gather import gathered_channels, gathered_sums, line_tokens
from kvq_kernels.decode_attention.lookup import looked_up_channels, looked_up_sums
from kvq_kernels.decode_attention.number import number
from kvq_kernels.decode_attention.rope import STEP
from kvq_kernels.decode_attention.spec import get, plane_count

#: Outliers that are added at once: the least that a product sums over.
PIECE = tl.constexpr(16)


@triton.jit
def _changes(side, S: tl.constexpr, begin, slot, count):
    """(token within the tile, channel, value less what the codes say) of the tile's outliers `slot` [n]; 0 from `count`
    on and for outliers of other heads."""
    D: tl.constexpr = get(S, "dim")
    SLOTS: tl.constexpr = get(S, "slots")
    BLOCK: tl.constexpr = get(S, "block")
    place = begin // BLOCK * SLOTS + slot
    index = tl.load(side[9] + place, mask=slot < count, other=0).to(tl.int32)
    if get(S, "across"):
        index -= side[11]
    real = (slot < count) & (index >= 0) & (index < BLOCK * D)
    index = tl.where(real, index, 0)
    token, channel = slot // SLOTS * BLOCK + index // D, index % D
    value = tl.load(side[10] + place, mask=real, other=0.0).to(tl.float32)
    change = value - number(side, S, begin + token, channel, real)
    return token, channel, tl.where(real, change, 0.0)


@triton.jit
def _turned_back(
    q, rope, position, channel, D: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """[M, n]: what each query has in `channel` [n] once it is turned back by `position` [n]."""
    member = tl.arange(0, M)[:, None]
    mine = (member < GROUP) & (channel >= 0)[None, :]
    own = tl.load(q + member * D + channel[None, :], mask=mine, other=0.0).to(tl.float32)
    if STYLE == "none":
        return own
    else:
        HALF: tl.constexpr = WIDTH // 2
        turned = channel < WIDTH
        if STYLE == "half":
            pair, first = channel % HALF, channel < HALF
            partner = tl.where(first, channel + HALF, channel - HALF)
        else:
            pair, first = channel // 2, channel % 2 == 0
            partner = channel + 1 - 2 * (channel % 2)
        other = tl.load(q + member * D + partner[None, :], mask=mine & turned[None, :], other=0.0).to(tl.float32)
        at1, at2 = position // STEP * WIDTH + pair, position % STEP * WIDTH + pair
        c1 = tl.load(rope[0] + at1, mask=turned, other=1.0)
        s1 = tl.load(rope[0] + at1 + HALF, mask=turned, other=0.0)
        c2 = tl.load(rope[1] + at2, mask=turned, other=1.0)
        s2 = tl.load(rope[1] + at2 + HALF, mask=turned, other=0.0)
        cos, sin = c1 * c2 - s1 * s2, s1 * c2 + c1 * s2
        return own * cos[None, :] + other * tl.where(first, sin, -sin)[None, :]


@triton.jit
def _equal(rows, columns):
    """[rows, columns]: 1 where they are the same, else 0."""
    return tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)


@triton.jit
def sparse_scores(
    scores, q, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scores` (L times [M, R], see `gather.py`) of the tile that starts at packed token `begin`, with its outliers."""
    count: tl.constexpr = L * R // get(S, "block") * get(S, "slots")
    line = tl.arange(0, R)
    for at in tl.range(0, count, PIECE, num_stages=1):
        token, channel, change = _changes(k, S, begin, at + tl.arange(0, PIECE), count)
        a = _turned_back(q, rope, start + begin + token, channel, get(S, "dim"), STYLE, WIDTH, GROUP, M)
        a *= change[None, :]
        new = ()
        for i in tl.static_range(L):
            there = _equal(token, line_tokens(line, i, R, BLOCK))
            new = new + (tl.dot(a, there, scores[i], input_precision=PRECISION),)
        scores = new
    return scores


@triton.jit
def sparse_values(
    acc, weights, v, S: tl.constexpr, begin, GATHERED: tl.constexpr, LOOKED_UP: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of `gather_values` (GATHERED), `lookup_values` (LOOKED_UP) or `plain_values` with the outliers of the tile
    that starts at `begin`."""
    count: tl.constexpr = L * R // get(S, "block") * get(S, "slots")
    PLANES: tl.constexpr = gathered_sums(S) if GATHERED else looked_up_sums(S) if LOOKED_UP else plane_count(S, E)
    line = tl.arange(0, R)
    for at in tl.range(0, count, PIECE, num_stages=1):
        token, channel, change = _changes(v, S, begin, at + tl.arange(0, PIECE), count)
        w = tl.zeros([PIECE, M], tl.float32)
        for i in tl.static_range(L):
            there = _equal(token, line_tokens(line, i, R, BLOCK))
            w = tl.dot(there, tl.trans(weights[i]), w, input_precision=PRECISION)
        w *= change[:, None]
        new = ()
        for p in tl.static_range(PLANES):
            if GATHERED or LOOKED_UP:
                there = _equal(gathered_channels(p, S) if GATHERED else looked_up_channels(p, S), channel)
                new = new + (tl.dot(there, w, acc[p], input_precision=PRECISION),)
            else:
                there = _equal(channel, p * E + tl.arange(0, E))
                new = new + (tl.dot(tl.trans(w), there, acc[p], input_precision=PRECISION),)
        acc = new
    return acc
