"""Rotary position embedding in kernels: channels of pairs, cosines and sines from the two tables of `parts.Rope`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load

#: `Rope.STEP`: rows of the fine table, positions between rows of the coarse table.
STEP = tl.constexpr(128)


@triton.constexpr_function
def padded_dim(dim: int) -> int:
    """head_dim as a power of two, at least 32: RoPE rotates 16 pairs at once, the least inner size of a product."""
    return max(32, triton.next_power_of_2(dim))


@triton.constexpr_function
def pair_offset(style: str, width: int, dim: int, index: int) -> int:
    """Item `index` of (a, b, c, d): pair p < width / 2 is channels (a p, a p + b), a later one (p + c, p + d).

    Scalars, because a function of a pair's number would not compile.
    """
    half = width // 2
    unrotated = (dim - width) // 2
    if style == "half":
        return (1, half, half, half + unrotated)[index]
    return (2, 1, half, half + unrotated)[index]


@triton.jit
def pair_channels(pair, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Both channels of each pair; pairs from WIDTH / 2 on, of the other channels, are not rotated."""
    half: tl.constexpr = WIDTH // 2
    a: tl.constexpr = pair_offset(STYLE, WIDTH, D, 0)
    b: tl.constexpr = pair_offset(STYLE, WIDTH, D, 1)
    c: tl.constexpr = pair_offset(STYLE, WIDTH, D, 2)
    d: tl.constexpr = pair_offset(STYLE, WIDTH, D, 3)
    rotated = pair < half
    return tl.where(rotated, a * pair, pair + c), tl.where(rotated, a * pair + b, pair + d)


@triton.jit
def load_cos_sin(table, at, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """(cos, sin) [at, pair] of row `at` [n, 1] of a table; 1 and 0 for pairs that are not rotated."""
    half: tl.constexpr = WIDTH // 2
    row = table + at * WIDTH
    mask = None if padded_dim(D) == WIDTH else pair < half
    return load(row, pair, mask, 1.0), load(row + pair, half, mask, 0.0)


@triton.jit
def position_cos_sin(rope, position, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """(cos, sin) [n, pairs] of positions [n], times the rotation's scale where pairs are rotated."""
    at, column = position[:, None], pair[None, :]
    c1, s1 = load_cos_sin(rope[0], at // STEP, column, WIDTH, D)
    c2, s2 = load_cos_sin(rope[1], at % STEP, column, WIDTH, D)
    return c1 * c2 - s1 * s2, s1 * c2 + c1 * s2


@triton.jit
def half_pairs(pair, HALF: tl.constexpr, ALL: tl.constexpr):
    """Both columns of each pair of ALL columns in style "half", of which the first 2 HALF are rotated."""
    if 2 * HALF == ALL:
        return pair, pair + HALF
    else:
        rotated = pair < HALF
        return tl.where(rotated, pair, pair + HALF), tl.where(rotated, pair + HALF, pair + ALL // 2)


@triton.jit
def unrotate(q1, q2, cos, sin):
    """R(-angle) of pairs (q1, q2)."""
    return q1 * cos + q2 * sin, q2 * cos - q1 * sin


@triton.jit
def unrotate_by_row(q1, q2, table, at, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """R(-angle) of pairs (q1, q2), by row `at` of a table."""
    cos, sin = load_cos_sin(table, at, pair, WIDTH, D)
    return unrotate(q1, q2, cos, sin)
