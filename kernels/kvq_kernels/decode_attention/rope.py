"""Rotary position embedding inside a kernel: pairs of channels, cosines and sines from two small tables."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.spec import padded, pair_first

#: Rows of the fine table, tokens between rows of the coarse one: `Rope.STEP`.
STEP = tl.constexpr(128)


@triton.jit
def pair_channels(pair, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """The two channels of each pair; pairs from WIDTH / 2 on are not turned and take what channels are left."""
    half: tl.constexpr = WIDTH // 2
    a: tl.constexpr = pair_first(STYLE, WIDTH, D, 0)
    b: tl.constexpr = pair_first(STYLE, WIDTH, D, 1)
    c: tl.constexpr = pair_first(STYLE, WIDTH, D, 2)
    d: tl.constexpr = pair_first(STYLE, WIDTH, D, 3)
    turned = pair < half
    return tl.where(turned, a * pair, pair + c), tl.where(turned, a * pair + b, pair + d)


@triton.jit
def turn(table, at, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """cos, sin [at, pair] of row `at` [n, 1] of a table; 1 and 0 for pairs that are not turned."""
    half: tl.constexpr = WIDTH // 2
    row = table + at * WIDTH
    real = None if padded(D) == WIDTH else pair < half
    return load(row, pair, real, 1.0), load(row + pair, half, real, 0.0)


@triton.jit
def position_turn(rope, position, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """cos, sin [n, pairs] of positions [n], times the rotation's scale where pairs are turned."""
    at, column = position[:, None], pair[None, :]
    c1, s1 = turn(rope[0], at // STEP, column, WIDTH, D)
    c2, s2 = turn(rope[1], at % STEP, column, WIDTH, D)
    return c1 * c2 - s1 * s2, s1 * c2 + c1 * s2


@triton.jit
def pairs(place, HALF: tl.constexpr, ALL: tl.constexpr):
    """The two of each pair `place` of ALL columns, of which 2 HALF are turned; others are paired as they are left."""
    if 2 * HALF == ALL:
        return place, place + HALF
    else:
        turned = place < HALF
        return tl.where(turned, place, place + HALF), tl.where(turned, place + HALF, place + ALL // 2)


@triton.jit
def turned_back(q1, q2, cos, sin):
    return q1 * cos + q2 * sin, q2 * cos - q1 * sin


@triton.jit
def turn_back(q1, q2, table, at, pair, WIDTH: tl.constexpr, D: tl.constexpr):
    """Pairs turned back by what row `at` of a table says."""
    cos, sin = turn(table, at, pair, WIDTH, D)
    return turned_back(q1, q2, cos, sin)
