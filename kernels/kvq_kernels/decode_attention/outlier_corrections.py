"""Corrections of scores and sums for outliers: value minus dequantized code, scatter-added a chunk at a time.

`outliers.py` reads the outliers, `one_hot_mma.py` adds them by one-hot products: without atomics, so that results are
deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.one_hot_mma import (
    mma_order,
    one_hot_mma,
    right_operands,
    split_bf16,
    spread_indices,
    subnormal,
    uses_bf16_pairs,
)
from kvq_kernels.decode_attention.outliers import CHUNK, load_corrections, outlier_chunk, outlier_runs
from kvq_kernels.decode_attention.rope import STEP
from kvq_kernels.decode_attention.subtiles import subtile_tokens


@triton.constexpr_function
def subtile_steps(index: int, rows: int, block: int) -> tuple[int, ...]:
    """Distances in tokens from row 0 of subtile 0 to rows 0, 8, ... of subtile `index` (see `subtile_tokens`)."""
    return tuple(row * block + index // block * (rows * block) + index % block for row in range(0, rows, 8))


@triton.jit
def opaque_zero(begin):
    """Opaque zero, to start a loop at: keeps its first iteration from being hoisted out of the loop over tiles, which
    would spill."""
    return tl.minimum(begin, 0)


@triton.jit
def _rotated_products(
    q, rope, position, channel, correction, D: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP tensors [CHUNK]: each query, rotated back by `position`, in `channel`, times the correction."""
    HALF: tl.constexpr = WIDTH // 2
    parts = ()
    if STYLE == "none":
        for m in tl.static_range(GROUP):
            parts = parts + (tl.load(q + channel + m * D).to(tl.float32) * correction,)
    else:
        if STYLE == "half":
            pair, first = channel % HALF, channel < HALF
            partner = channel ^ HALF if HALF & (HALF - 1) == 0 else channel + tl.where(first, HALF, -HALF)
        else:
            pair, first = channel // 2, channel % 2 == 0
            partner = channel ^ 1
        coarse, fine = rope[0] + (position // STEP * WIDTH + pair), rope[1] + (position % STEP * WIDTH + pair)
        if WIDTH < D:
            rotated = channel < WIDTH
            partner = tl.where(rotated, partner, channel)
            c1, s1 = tl.load(coarse, mask=rotated, other=1.0), tl.load(coarse + HALF, mask=rotated, other=0.0)
            c2, s2 = tl.load(fine, mask=rotated, other=1.0), tl.load(fine + HALF, mask=rotated, other=0.0)
        else:
            c1, s1, c2, s2 = tl.load(coarse), tl.load(coarse + HALF), tl.load(fine), tl.load(fine + HALF)
        cos, sin = (c1 * c2 - s1 * s2) * correction, (s1 * c2 + c1 * s2) * tl.where(first, correction, -correction)
        x1, x2 = q + channel, q + partner
        for m in tl.static_range(GROUP):
            x = tl.load(x1 + m * D).to(tl.float32) * cos + tl.load(x2 + m * D).to(tl.float32) * sin
            parts = parts + (x,)
    return parts


@triton.jit
def correct_scores(scores, layout, q, k, begin, rope, start, C: tl.constexpr):
    """Scores (L subtiles [M, R]) of the tile that starts at packed token `begin`, corrected for the keys' outliers."""
    S: tl.constexpr = C.S
    STYLE: tl.constexpr = C.STYLE
    WIDTH: tl.constexpr = C.WIDTH
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    PRECISION: tl.constexpr = C.PRECISION
    PAIRS: tl.constexpr = uses_bf16_pairs(S, PRECISION)
    thread = tl.arange(0, 8)[None, None, :, None]
    subtiles = ()
    for i in tl.static_range(L):
        subtiles = subtiles + (tl.trans(scores[i]),)
    runs = outlier_runs(k, S, begin, L * R)
    for at in tl.range(opaque_zero(begin), runs[len(runs) - 1][0], CHUNK, num_stages=1):
        token, channel, correction = load_corrections(k, S, begin, outlier_chunk(runs, S, at))
        if PAIRS:
            correction *= 128.0
        position = (start + begin + token).to(tl.uint32)  # unsigned: cheaper division
        a = _rotated_products(q, rope, position, channel, correction, S.dim, STYLE, WIDTH, GROUP)
        a = right_operands(split_bf16(a) if PAIRS else a, layout, M, PAIRS)
        distance = spread_indices(token, layout, S) - subnormal(subtile_tokens(thread, 0, R, BLOCK))
        new = ()
        for i in tl.static_range(L):
            new = new + (one_hot_mma(distance, subtile_steps(i, R, BLOCK), a, subtiles[i], PRECISION),)
        subtiles = new
    corrected = ()
    for i in tl.static_range(L):
        corrected = corrected + (tl.trans(subtiles[i]),)
    return corrected


@triton.jit
def interleaved(tiles, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """L tiles [M, R] as one [M, R L]: column `line` L + i is column `line` of tile i."""
    if L == 1:
        return tiles[0]
    else:
        both = tl.join(interleaved(tiles[: L // 2], M, R, L // 2), interleaved(tiles[L // 2 :], M, R, L // 2))
        both = tl.permute(tl.reshape(both, [M, R, L // 2, 2]), (0, 1, 3, 2))
        return tl.reshape(both, [M, R * L])


@triton.jit
def _packed_fp16(p, GROUP: tl.constexpr, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """`interleaved` rows of GROUP queries of L tiles [M, R], as float16, two per int32: [at least GROUP / 2, R L]."""
    convert: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    packed = ()
    for i in tl.static_range(L):
        even, odd = tl.split(tl.permute(tl.reshape(p[i], [M // 2, 2, R]), (0, 2, 1)))
        packed = packed + (tl.inline_asm_elementwise(convert, "=r,r,r", [even, odd], tl.int32, is_pure=True, pack=1),)
    return _first_rows(interleaved(packed, M // 2, R, L), (GROUP + 1) // 2, M // 2, R * L)


@triton.jit
def _first_rows(x, COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """First rows of x [M, N], at least COUNT."""
    if M >= 2 * COUNT:
        first, _ = tl.split(tl.permute(tl.reshape(x, [2, M // 2, N]), (1, 2, 0)))
        return _first_rows(first, COUNT, M // 2, N)
    else:
        return x


@triton.jit
def _unstack_rows(x, M: tl.constexpr):
    """x [M, CHUNK] as a tuple of rows [CHUNK]."""
    if M == 1:
        return (tl.reshape(x, [CHUNK]),)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, [2, M // 2, CHUNK]), (1, 2, 0)))
        return _unstack_rows(first, M // 2) + _unstack_rows(second, M // 2)


@triton.jit
def _weighted(packed, correction, GROUP: tl.constexpr):
    """GROUP tensors [CHUNK]: weights unpacked from `_packed_fp16`, times the correction."""
    parts = ()
    for m in tl.static_range(GROUP):
        x = (packed[m // 2] >> (m % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True)
        parts = parts + (x.to(tl.float32) * correction,)
    return parts


@triton.jit
def _gather_columns(x, column, M: tl.constexpr, N: tl.constexpr):
    """x[:, column] as [M, CHUNK], by warp shuffles."""
    if N <= 32:
        return tl.gather(x, column, 1)
    else:
        even, odd = tl.split(tl.reshape(x, [M, N // 2, 2]))
        even, odd = _gather_columns(even, column // 2, M, N // 2), _gather_columns(odd, column // 2, M, N // 2)
        return tl.where(column % 2 == 0, even, odd)


@triton.jit
def correct_values(acc, layout, p, v, begin, C: tl.constexpr):
    """Accumulator corrected for outliers of the values in the tile that starts at packed token `begin`."""
    if C.reader.paired:
        return _correct_tiles(acc[0], layout, p, v, begin, C), acc[1]
    else:
        return _correct_tiles(acc, layout, p, v, begin, C)


@triton.jit
def _correct_tiles(acc, layout, p, v, begin, C: tl.constexpr):
    """`correct_values` of an accumulator's tiles."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    PRECISION: tl.constexpr = C.PRECISION
    TRANSPOSED: tl.constexpr = C.reader.transposed
    TILES: tl.constexpr = C.reader.tiles(C)
    PAIRS: tl.constexpr = uses_bf16_pairs(S, PRECISION)
    thread = tl.arange(0, 8)[None, None, :, None]
    if C.reader.crowded:
        tl.debug_barrier()  # not while values still fill the registers
    weights_of_tile = _packed_fp16(p, GROUP, M, R, L) if PAIRS else interleaved(p, M, R, L)
    row = C.reader.channel(thread, C)
    runs = outlier_runs(v, S, begin, L * R)
    for at in tl.range(opaque_zero(begin), runs[len(runs) - 1][0], CHUNK, num_stages=1):
        token, channel, correction = load_corrections(v, S, begin, outlier_chunk(runs, S, at))
        column = token % (R * BLOCK) // BLOCK * L + (token // (R * BLOCK) * BLOCK + token % BLOCK)
        ROWS: tl.constexpr = weights_of_tile.shape[0]
        w = _gather_columns(weights_of_tile, column[None, :] + tl.zeros([ROWS, 1], tl.int32), ROWS, L * R)
        if PAIRS:
            w = split_bf16(_weighted(_unstack_rows(w, ROWS), correction * 128.0, GROUP))
            w = right_operands(w, layout, M, PAIRS)
        else:
            w = (mma_order(tl.trans(w * correction[None, :]), M),)
        distance = spread_indices(channel, layout, S) - subnormal(row)
        new = ()
        for i in tl.static_range(TILES):
            old = tl.trans(acc[i]) if TRANSPOSED else acc[i]
            tile = one_hot_mma(distance, C.reader.steps(i, C), w, old, PRECISION)
            new = new + (tl.trans(tile) if TRANSPOSED else tile,)
        acc = new
    return acc
