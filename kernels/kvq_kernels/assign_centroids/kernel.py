"""Both steps are matrix products with something made on the spot: the least of a row of distances, or rows of a 1 at
the code's place. Float32 numbers enter them as sums of 16-bit ones, in columns that the products need anyway: their
inner size is at least 16, a point has 1 to 8 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Scaled points are moved to at most so much, the largest centroid is below 2^5: float16 holds both.
FARTHEST = tl.constexpr(60000.0)


@triton.jit
def assign_kernel(
    points,  # float32 [codebooks, points, SIZE]
    table,  # float16 [codebooks, K, N], see `launch.centroid_table`
    scale,  # float32 [codebooks]: of the table
    codes,  # uint8 [codebooks, points]
    scores,  # float32
    count,
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,  # entries, padded
    R: tl.constexpr,  # points of a tile
    TILES: tl.constexpr,
):
    """u.c = (h + l).(h' + l') without l.l': columns h, h, l of the point meet rows -h', -l', -h' of the table, then
    three columns of 1 the three parts of ||c||^2 / 2."""
    book = tl.program_id(1).to(tl.int64)
    column, entry = tl.arange(0, K), tl.arange(0, N)
    rows = tl.load(table + book * (K * N) + column[:, None] * N + entry[None, :])
    gain = tl.load(scale + book)
    first = tl.program_id(0) * (R * TILES)
    last = tl.minimum(first + R * TILES, count)
    for begin in tl.range(first, last, R, num_stages=1):
        point = begin + tl.arange(0, R)
        seen = point < count
        at = book * count + point
        mine = seen[:, None] & (column < 3 * SIZE)[None, :]
        x = tl.load(points + at[:, None] * SIZE + (column % SIZE)[None, :], mask=mine, other=0.0) * gain
        x = tl.minimum(tl.maximum(x, -FARTHEST), FARTHEST)
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
        one = tl.where((column >= 3 * SIZE) & (column < 3 * SIZE + 3), 1.0, 0.0).to(tl.float16)
        a = tl.where((column < 2 * SIZE)[None, :], high, tl.where((column < 3 * SIZE)[None, :], low, one[None, :]))
        distances = tl.dot(a, rows)
        if ENTRIES < N:
            distances = tl.where((entry < ENTRIES)[None, :], distances, float("inf"))
        best = tl.min(distances, axis=1)
        code = tl.min(tl.where(distances == best[:, None], entry[None, :], N - 1), axis=1)
        tl.store(codes + at, code.to(tl.uint8), mask=seen)
        tl.store(scores + at, best / gain / gain, mask=seen)


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
    TILES: tl.constexpr,
    T: tl.constexpr,  # bfloat16; float32 in the interpreter, which cannot multiply it
):
    """A number is the sum of three of 8 significant bits each, which lose nothing as bfloat16; a program adds few of
    them in float32."""
    book = tl.program_id(1).to(tl.int64)
    column, entry = tl.arange(0, C), tl.arange(0, N)
    total = tl.zeros([N, C], tl.float32)
    first = tl.program_id(0) * (R * TILES)
    last = tl.minimum(first + R * TILES, count)
    for begin in tl.range(first, last, R, num_stages=1):
        point = begin + tl.arange(0, R)
        at = book * count + point
        mine = (point < count)[:, None] & (column < 3 * COLUMNS)[None, :]
        x = tl.load(numbers + at[:, None] * COLUMNS + (column % COLUMNS)[None, :], mask=mine, other=0.0)
        high = _eight_bits(x)
        middle = _eight_bits(x - high)
        low = x - high - middle
        part = tl.where((column < COLUMNS)[None, :], high, tl.where((column < 2 * COLUMNS)[None, :], middle, low))
        code = tl.load(codes + at, mask=point < count, other=0).to(tl.int32)
        member = tl.where(entry[:, None] == code[None, :], 1.0, 0.0).to(T)
        total = tl.dot(member, part.to(T), total, input_precision="ieee")
    place = (book * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry
    mine = (entry < ENTRIES)[:, None] & (column < 3 * COLUMNS)[None, :]
    tl.store(partial + place[:, None] * (3 * COLUMNS) + column[None, :], total, mask=mine)


@triton.jit
def _eight_bits(x):
    """float32 numbers cut off after 8 significant bits."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
