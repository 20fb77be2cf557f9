"""Outliers of the main loop's tiles: what they are more than the codes say is added to scores and to sums.

They are added a piece at a time, by products with matrices of ones and zeros that say where each belongs: nothing is
written twice, so that no order matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.gather import gathered_channel, gathered_steps, gathered_sums, line_tokens
from kvq_kernels.decode_attention.lookup import looked_up_channel, looked_up_steps, looked_up_sums
from kvq_kernels.decode_attention.order import load_apart
from kvq_kernels.decode_attention.permute import interpreted
from kvq_kernels.decode_attention.rope import STEP
from kvq_kernels.decode_attention.slots import PIECE, changes, own_slots, piece, place, rounds
from kvq_kernels.decode_attention.spec import get, plane_count


@triton.constexpr_function
def in_pairs(spec, precision):
    """Whether products are of bfloat16, two for each number: its first 8 digits and the next 8."""
    return spec.nvidia and precision != "ieee" and not interpreted()


@triton.constexpr_function
def line_steps(i, lines, block):
    """Tokens from line 0 of the first tile to lines 0, 8, ... of the i-th, see `gather.line_tokens`."""
    return tuple(line * block + i // block * (lines * block) + i % block for line in range(0, lines, 8))


@triton.constexpr_function
def sum_steps(p, spec, gathered, looked_up, columns):
    """Channels from row 0 of the first sum to rows 0, 8, ... of the p-th."""
    if gathered:
        return gathered_steps(p, spec)
    return looked_up_steps(p, spec) if looked_up else tuple(range(p * columns, (p + 1) * columns, 8))


@triton.jit
def zero(begin):
    """Where a loop over pieces begins, as the compiler does not know: else what its first turn needs is made before the
    loop over tiles, to more registers than there are."""
    return tl.minimum(begin, 0)


@triton.jit
def _spread(x):
    """[PIECE] as [PIECE / 16, 4, 1, 4]: in the order in which products sum over them."""
    return tl.permute(tl.reshape(x, [PIECE // 16, 4, 4]), (0, 2, 1))[:, :, None, :]


@triton.jit
def _stacked(parts, N: tl.constexpr):
    """N tensors [PIECE / 16, 4, 8, 4] as one."""
    if N == 1:
        return tl.reshape(parts[0], [1, PIECE // 16, 4, 8, 4])
    else:
        both = tl.join(_stacked(parts[: N // 2], N // 2), _stacked(parts[N // 2 :], N // 2))
        return tl.reshape(tl.permute(both, (5, 0, 1, 2, 3, 4)), [N, PIECE // 16, 4, 8, 4])


@triton.jit
def _operand(parts, N: tl.constexpr):
    """N tensors [PIECE / 16, 4, 8, 4] as one side of products [8 N, PIECE], whose threads are the last axes."""
    return tl.reshape(tl.permute(_stacked(parts, N), (0, 3, 1, 4, 2)), [8 * N, PIECE])


@triton.jit
def _places(side, S: tl.constexpr, begin, slot):
    """`place` as [PIECE / 16, 4, 8, 4], alike for all 8; loaded by the threads that compare it, which costs less than
    handing on what follows from comparisons."""
    nothing = tl.minimum(tl.arange(0, 8), zero(begin))  # else the compiler would see that they are alike
    return place(side, S, begin, _spread(slot) + nothing[None, None, :, None])


@triton.jit
def _turned_back(
    q, rope, position, channel, change, channels, D: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """[M, PIECE]: what each query has in `channel` [PIECE] once it is turned back by `position`, times `change`.
    channels: the same as `_places` has them."""
    HALF: tl.constexpr = WIDTH // 2
    if STYLE == "none":
        cos, sin, partners = _spread(change), 0.0, channels
    else:
        turned = channel < WIDTH
        if STYLE == "half":
            pair, first = channel % HALF, channel < HALF
            partners = channels + tl.where(channels < HALF, HALF, -HALF)
        else:
            pair, first = channel // 2, channel % 2 == 0
            partners = channels ^ 1
        at1, at2 = position // STEP * WIDTH + pair, position % STEP * WIDTH + pair
        c1 = tl.load(rope[0] + at1, mask=turned, other=1.0)
        s1 = tl.load(rope[0] + at1 + HALF, mask=turned, other=0.0)
        c2 = tl.load(rope[1] + at2, mask=turned, other=1.0)
        s2 = tl.load(rope[1] + at2 + HALF, mask=turned, other=0.0)
        cos = _spread((c1 * c2 - s1 * s2) * change)
        sin = _spread((s1 * c2 + c1 * s2) * tl.where(first, change, -change))
    parts = ()
    for i in tl.static_range(M // 8):
        row = q + tl.minimum(8 * i + tl.arange(0, 8)[None, None, :, None], GROUP - 1) * D
        x = load_apart(row, channels).to(tl.float32) * cos
        if STYLE != "none":
            if WIDTH < D:
                partners = tl.where(channels < WIDTH, partners, channels)
            x += load_apart(row, partners).to(tl.float32) * sin
        parts = parts + (x,)
    return _operand(parts, M // 8)


@triton.jit
def _small(x):
    """float16: integers below 1024 as subnormal numbers, which takes no conversion."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _ones(apart, step: tl.constexpr, PAIRS: tl.constexpr):
    """Where `apart` is `_small(step)` 1, else 0. PAIRS: in bfloat16, where what float16 has as 1 is 2^-7."""
    if PAIRS:
        there = tl.full(apart.shape, step * 2.0**-24, tl.float16)
        equal: tl.constexpr = "set.eq.f16x2.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(equal, "=r,r,r", [apart, there], tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.where(apart == step * 2.0**-24, 1.0, 0.0)


@triton.jit
def _halves(x, PAIRS: tl.constexpr):
    """What is multiplied with `_ones`."""
    if PAIRS:
        x *= 128.0
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return (x,)


@triton.jit
def _added(apart, steps: tl.constexpr, halves, acc, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """acc [8 rows for each of `steps`, n] with `halves` where rows are `apart` by that step."""
    parts = ()
    for i in tl.static_range(len(steps)):
        parts = parts + (_ones(apart, steps[i], PAIRS),)
    ones = _operand(parts, len(steps))
    for i in tl.static_range(len(halves)):
        acc = tl.dot(ones, halves[i], acc, input_precision=PRECISION)
    return acc


@triton.jit
def sparse_scores(
    scores, q, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scores` (L times [M, R], see `gather.py`) of the tile that starts at packed token `begin`, with its outliers."""
    PAIRS: tl.constexpr = in_pairs(S, PRECISION)
    thread = tl.arange(0, 8)[None, None, :, None]
    lines = ()
    for i in tl.static_range(L):
        lines = lines + (tl.trans(scores[i]),)
    for part in tl.range(0, rounds(S, L * R), num_stages=1):
        own = own_slots(k, S, begin, 32 * part, L * R)
        for at in tl.range(zero(begin), own[2], PIECE, num_stages=1):
            slot, real = piece(own, S, 32 * part, at)
            token, channel, change = changes(k, S, begin, slot, real)
            tokens, channels = _places(k, S, begin, slot)
            position = start + begin + token
            a = _turned_back(q, rope, position, channel, change, channels, get(S, "dim"), STYLE, WIDTH, GROUP, M)
            a = _halves(tl.trans(a), PAIRS)
            apart = _small(tokens) - _small(line_tokens(thread, 0, R, BLOCK))
            new = ()
            for i in tl.static_range(L):
                new = new + (_added(apart, line_steps(i, R, BLOCK), a, lines[i], PAIRS, PRECISION),)
            lines = new
    found = ()
    for i in tl.static_range(L):
        found = found + (tl.trans(lines[i]),)
    return found


@triton.jit
def joined(tiles, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """[M, R L]: column `line` L + i is column `line` of the i-th of L tiles [M, R]."""
    if L == 1:
        return tiles[0]
    else:
        both = tl.join(joined(tiles[: L // 2], M, R, L // 2), joined(tiles[L // 2 :], M, R, L // 2))
        both = tl.permute(tl.reshape(both, [M, R, L // 2, 2]), (0, 1, 3, 2))
        return tl.reshape(both, [M, R * L])


@triton.jit
def _of_columns(x, column, M: tl.constexpr, N: tl.constexpr):
    """[M, PIECE]: the columns `column` of x [M, N], by shuffles of as many as there are threads."""
    if N <= 32:
        return tl.gather(x, column, 1)
    else:
        even, odd = tl.split(tl.reshape(x, [M, N // 2, 2]))
        even, odd = _of_columns(even, column // 2, M, N // 2), _of_columns(odd, column // 2, M, N // 2)
        return tl.where(column % 2 == 0, even, odd)


@triton.jit
def sparse_values(
    acc, weights, v, S: tl.constexpr, begin, GATHERED: tl.constexpr, LOOKED_UP: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of `gather_values` (GATHERED), `lookup_values` (LOOKED_UP) or `plain_values` with the outliers of the tile
    that starts at `begin`."""
    PAIRS: tl.constexpr = in_pairs(S, PRECISION)
    SUMS: tl.constexpr = gathered_sums(S) if GATHERED else looked_up_sums(S) if LOOKED_UP else plane_count(S, E)
    thread = tl.arange(0, 8)[None, None, :, None]
    if GATHERED:
        tl.debug_barrier()  # else it is begun while values still fill the registers
    every = joined(weights, M, R, L)
    if GATHERED:
        row = gathered_channel(0, 0, thread, S)
    elif LOOKED_UP:
        row = looked_up_channel(0, 0, thread, S)
    else:
        row = thread
    for part in tl.range(0, rounds(S, L * R), num_stages=1):
        own = own_slots(v, S, begin, 32 * part, L * R)
        for at in tl.range(zero(begin), own[2], PIECE, num_stages=1):
            slot, real = piece(own, S, 32 * part, at)
            token, channel, change = changes(v, S, begin, slot, real)
            column = token % (R * BLOCK) // BLOCK * L + (token // (R * BLOCK) * BLOCK + token % BLOCK)
            w = _of_columns(every, column[None, :] + tl.zeros([M, 1], tl.int32), M, L * R) * change[None, :]
            w = _halves(tl.trans(w), PAIRS)
            apart = _small(_places(v, S, begin, slot)[1]) - _small(row)
            new = ()
            for p in tl.static_range(SUMS):
                old = acc[p] if GATHERED or LOOKED_UP else tl.trans(acc[p])
                one = _added(apart, sum_steps(p, S, GATHERED, LOOKED_UP, E), w, old, PAIRS, PRECISION)
                new = new + (one if GATHERED or LOOKED_UP else tl.trans(one),)
            acc = new
    return acc
