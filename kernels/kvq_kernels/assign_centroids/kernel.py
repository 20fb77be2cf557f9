"""Kernels of k-means as matrix products: points times centroids, and one-hot codes times points.

Float32 numbers enter the products as sums of 16-bit ones, in columns that are free: the inner size of a product is at
least 16, and a point has 1 to 8 numbers. `launch.py` builds the table of centroids and passes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Bound that scaled points are clamped to; float16 holds it, and the largest scaled centroid, which is below 2^5.
MAX_POINT = tl.constexpr(60000.0)


@triton.jit
def assign_kernel(
    points,  # float32 [codebooks, points, SIZE]
    table,  # float16 [codebooks, K, N], see `launch.centroid_table`
    scale,  # float32 [codebooks], factor of the table
    codes,  # uint8 [codebooks, points]
    scores,  # float32
    count,
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,  # entries, padded
    R: tl.constexpr,  # points of a tile
    TILES: tl.constexpr,  # tiles of a program
):
    """Store argmin and minimum of ||c||^2 / 2 - u.c over the centroids c of each point u.

    With u = h + l and c = h' + l' in float16, u.c is without l.l': columns h, h, l of the point times rows -h', -l',
    -h' of the table. Three columns of 1 add the three parts of ||c||^2 / 2.
    """
    book = tl.program_id(1).to(tl.int64)
    column, entry = tl.arange(0, K), tl.arange(0, N)
    centroids = tl.load(table + book * (K * N) + column[:, None] * N + entry[None, :])
    point_scale = tl.load(scale + book)
    first = tl.program_id(0) * (R * TILES)
    last = tl.minimum(first + R * TILES, count)
    for begin in tl.range(first, last, R, num_stages=1):
        point = begin + tl.arange(0, R)
        valid = point < count
        index = book * count + point
        mask = valid[:, None] & (column < 3 * SIZE)[None, :]
        x = tl.load(points + index[:, None] * SIZE + (column % SIZE)[None, :], mask=mask, other=0.0) * point_scale
        x = tl.minimum(tl.maximum(x, -MAX_POINT), MAX_POINT)
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
        ones = tl.where((column >= 3 * SIZE) & (column < 3 * SIZE + 3), 1.0, 0.0).to(tl.float16)
        augmented = tl.where(
            (column < 2 * SIZE)[None, :], high, tl.where((column < 3 * SIZE)[None, :], low, ones[None, :])
        )
        distances = tl.dot(augmented, centroids)
        if ENTRIES < N:
            distances = tl.where((entry < ENTRIES)[None, :], distances, float("inf"))
        minimum = tl.min(distances, axis=1)
        code = tl.min(tl.where(distances == minimum[:, None], entry[None, :], N - 1), axis=1)
        tl.store(codes + index, code.to(tl.uint8), mask=valid)
        tl.store(scores + index, minimum / point_scale / point_scale, mask=valid)


@triton.jit
def sums_kernel(
    numbers,  # float32 [codebooks, points, COLUMNS]
    codes,  # [codebooks, points]
    partial,  # float32 [codebooks, programs of a codebook, ENTRIES, 3, COLUMNS]
    count,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    N: tl.constexpr,  # entries, padded
    C: tl.constexpr,  # 3 COLUMNS, padded
    R: tl.constexpr,  # points of a tile
    TILES: tl.constexpr,  # tiles of a program
    T: tl.constexpr,  # bfloat16; float32 in the interpreter, which cannot multiply it
):
    """Store each program's sums of numbers by code, as one-hot products.

    A number is split into three of 8 significant bits, exact in bfloat16; a program adds few of them in float32.
    """
    book = tl.program_id(1).to(tl.int64)
    column, entry = tl.arange(0, C), tl.arange(0, N)
    sums = tl.zeros([N, C], tl.float32)
    first = tl.program_id(0) * (R * TILES)
    last = tl.minimum(first + R * TILES, count)
    for begin in tl.range(first, last, R, num_stages=1):
        point = begin + tl.arange(0, R)
        index = book * count + point
        mask = (point < count)[:, None] & (column < 3 * COLUMNS)[None, :]
        x = tl.load(numbers + index[:, None] * COLUMNS + (column % COLUMNS)[None, :], mask=mask, other=0.0)
        high = _truncate_to_8_bits(x)
        middle = _truncate_to_8_bits(x - high)
        low = x - high - middle
        part = tl.where((column < COLUMNS)[None, :], high, tl.where((column < 2 * COLUMNS)[None, :], middle, low))
        code = tl.load(codes + index, mask=point < count, other=0).to(tl.int32)
        one_hot = tl.where(entry[:, None] == code[None, :], 1.0, 0.0).to(T)
        sums = tl.dot(one_hot, part.to(T), sums, input_precision="ieee")
    output = (book * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry
    mask = (entry < ENTRIES)[:, None] & (column < 3 * COLUMNS)[None, :]
    tl.store(partial + output[:, None] * (3 * COLUMNS) + column[None, :], sums, mask=mask)


@triton.jit
def _truncate_to_8_bits(x):
    """float32 numbers truncated to 8 significant bits."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
