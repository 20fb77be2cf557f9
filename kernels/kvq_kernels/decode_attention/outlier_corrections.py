"""Outliers of the main loop's tiles: what they are more than the codes say is added to scores and to sums.

They are added a piece at a time, by products with matrices of ones and zeros that say where each belongs: nothing is
written twice, so that no order matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.one_hot_mma import added, halves_of, in_order, in_pairs, operands, places, small
from kvq_kernels.decode_attention.outliers import PIECE, changes, piece, slot_runs
from kvq_kernels.decode_attention.rope import STEP
from kvq_kernels.decode_attention.scalar_codebook import looked_up_channel, looked_up_steps, looked_up_sums
from kvq_kernels.decode_attention.spec import get, plane_count
from kvq_kernels.decode_attention.vector_codebook import gathered_channel, gathered_steps, gathered_sums, line_tokens


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
def _turned_back(
    q, rope, position, channel, change, D: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """GROUP times [PIECE]: what each query has in `channel` once it is turned back by `position`, times `change`."""
    HALF: tl.constexpr = WIDTH // 2
    parts = ()
    if STYLE == "none":
        for m in tl.static_range(GROUP):
            parts = parts + (tl.load(q + channel + m * D).to(tl.float32) * change,)
    else:
        if STYLE == "half":
            pair, first = channel % HALF, channel < HALF
            partner = channel ^ HALF if HALF & (HALF - 1) == 0 else channel + tl.where(first, HALF, -HALF)
        else:
            pair, first = channel // 2, channel % 2 == 0
            partner = channel ^ 1
        coarse, fine = rope[0] + (position // STEP * WIDTH + pair), rope[1] + (position % STEP * WIDTH + pair)
        if WIDTH < D:
            turned = channel < WIDTH
            partner = tl.where(turned, partner, channel)
            c1, s1 = tl.load(coarse, mask=turned, other=1.0), tl.load(coarse + HALF, mask=turned, other=0.0)
            c2, s2 = tl.load(fine, mask=turned, other=1.0), tl.load(fine + HALF, mask=turned, other=0.0)
        else:
            c1, s1, c2, s2 = tl.load(coarse), tl.load(coarse + HALF), tl.load(fine), tl.load(fine + HALF)
        cos, sin = (c1 * c2 - s1 * s2) * change, (s1 * c2 + c1 * s2) * tl.where(first, change, -change)
        own, other = q + channel, q + partner
        for m in tl.static_range(GROUP):
            x = tl.load(own + m * D).to(tl.float32) * cos + tl.load(other + m * D).to(tl.float32) * sin
            parts = parts + (x,)
    return parts


@triton.jit
def sparse_scores(
    scores, threads, q, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`scores` (L times [M, R], see `gather.py`) of the tile that starts at packed token `begin`, with its outliers."""
    PAIRS: tl.constexpr = in_pairs(S, PRECISION)
    thread = tl.arange(0, 8)[None, None, :, None]
    lines = ()
    for i in tl.static_range(L):
        lines = lines + (tl.trans(scores[i]),)
    runs = slot_runs(k, S, begin, L * R)
    for at in tl.range(zero(begin), runs[len(runs) - 1][0], PIECE, num_stages=1):
        token, channel, change = changes(k, S, begin, piece(runs, S, at))
        if PAIRS:
            change *= 128.0
        position = (start + begin + token).to(tl.uint32)  # no signs to take care of
        a = _turned_back(q, rope, position, channel, change, get(S, "dim"), STYLE, WIDTH, GROUP)
        a = operands(halves_of(a) if PAIRS else a, threads, M, PAIRS)
        apart = places(token, threads, S) - small(line_tokens(thread, 0, R, BLOCK))
        new = ()
        for i in tl.static_range(L):
            new = new + (added(apart, line_steps(i, R, BLOCK), a, lines[i], PRECISION),)
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
def _in_twos(weights, GROUP: tl.constexpr, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """Of L tiles [M, R] the rows of GROUP queries as float16, two in an int32: `joined`, [at least GROUP / 2, R L]."""
    pack: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    twos = ()
    for i in tl.static_range(L):
        even, odd = tl.split(tl.permute(tl.reshape(weights[i], [M // 2, 2, R]), (0, 2, 1)))
        twos = twos + (tl.inline_asm_elementwise(pack, "=r,r,r", [even, odd], tl.int32, is_pure=True, pack=1),)
    return _first_rows(joined(twos, M // 2, R, L), (GROUP + 1) // 2, M // 2, R * L)


@triton.jit
def _first_rows(x, COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Of x [M, N] at least COUNT."""
    if M >= 2 * COUNT:
        first, _ = tl.split(tl.permute(tl.reshape(x, [2, M // 2, N]), (1, 2, 0)))
        return _first_rows(first, COUNT, M // 2, N)
    else:
        return x


@triton.jit
def _rows(x, M: tl.constexpr):
    """The rows [PIECE] of x [M, PIECE]."""
    if M == 1:
        return (tl.reshape(x, [PIECE]),)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, [2, M // 2, PIECE]), (1, 2, 0)))
        return _rows(first, M // 2) + _rows(second, M // 2)


@triton.jit
def _times(twos, change, GROUP: tl.constexpr):
    """GROUP times [PIECE]: numbers of `_in_twos` times `change`."""
    parts = ()
    for m in tl.static_range(GROUP):
        x = (twos[m // 2] >> (m % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True)
        parts = parts + (x.to(tl.float32) * change,)
    return parts


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
    acc, threads, weights, v, S: tl.constexpr, begin, GATHERED: tl.constexpr, LOOKED_UP: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of `gather_values` (GATHERED), `lookup_values` (LOOKED_UP) or `plain_values` with the outliers of the tile
    that starts at `begin`."""
    PAIRS: tl.constexpr = in_pairs(S, PRECISION)
    SUMS: tl.constexpr = gathered_sums(S) if GATHERED else looked_up_sums(S) if LOOKED_UP else plane_count(S, E)
    thread = tl.arange(0, 8)[None, None, :, None]
    if GATHERED:
        tl.debug_barrier()  # else it is begun while values still fill the registers
    every = _in_twos(weights, GROUP, M, R, L) if PAIRS else joined(weights, M, R, L)
    if GATHERED:
        row = gathered_channel(0, 0, thread, S)
    elif LOOKED_UP:
        row = looked_up_channel(0, 0, thread, S)
    else:
        row = thread
    runs = slot_runs(v, S, begin, L * R)
    for at in tl.range(zero(begin), runs[len(runs) - 1][0], PIECE, num_stages=1):
        token, channel, change = changes(v, S, begin, piece(runs, S, at))
        column = token % (R * BLOCK) // BLOCK * L + (token // (R * BLOCK) * BLOCK + token % BLOCK)
        ROWS: tl.constexpr = every.shape[0]
        w = _of_columns(every, column[None, :] + tl.zeros([ROWS, 1], tl.int32), ROWS, L * R)
        if PAIRS:
            w = halves_of(_times(_rows(w, ROWS), change * 128.0, GROUP))
            w = operands(w, threads, M, PAIRS)
        else:
            w = (in_order(tl.trans(w * change[None, :]), M),)
        apart = places(channel, threads, S) - small(row)
        new = ()
        for p in tl.static_range(SUMS):
            old = acc[p] if GATHERED or LOOKED_UP else tl.trans(acc[p])
            one = added(apart, sum_steps(p, S, GATHERED, LOOKED_UP, E), w, old, PRECISION)
            new = new + (one if GATHERED or LOOKED_UP else tl.trans(one),)
        acc = new
    return acc
