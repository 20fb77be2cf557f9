"""Outlier lists of a tile, read `CHUNK` at a time: one outlier per thread, else every thread would compute all of them.

`outlier_corrections.py` adds them to scores and sums. Each block of the tile has a list with a run of slots per head;
the runs of all blocks are read as one sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Outliers read at once.
CHUNK = tl.constexpr(32)


@triton.jit
def outlier_runs(side, S: tl.constexpr, begin, N: tl.constexpr):
    """Tuple over the blocks of the tile of N tokens that starts at packed token `begin`: (end, shift).

    end: number of this head's outliers in this and earlier blocks. shift: from an outlier's index in that sequence to
    its slot in the tile's lists.
    """
    BLOCKS: tl.constexpr = N // S.outlier_block
    CAPACITY: tl.constexpr = S.outliers
    runs = ()
    if S.pooled_heads == 0:
        for i in tl.static_range(BLOCKS):
            runs = runs + (((i + 1) * CAPACITY, 0),)
    else:
        WIDE: tl.constexpr = S.pooled_heads + 1
        start = side.outliers.start + begin // S.outlier_block * WIDE
        end = 0
        for i in tl.static_range(BLOCKS):
            first, last = tl.load(start + i * WIDE), tl.load(start + i * WIDE + 1)
            shift = i * CAPACITY + first - end
            end += last - first
            runs = runs + ((end, shift),)
    return runs


@triton.jit
def outlier_chunk(runs, S: tl.constexpr, at):
    """(slots [CHUNK] in the tile's lists, first tokens of their blocks, valid) of outliers `at`, at + 1, ... of
    `outlier_runs`; where not valid, another slot of the head."""
    BLOCK: tl.constexpr = S.outlier_block
    count = runs[len(runs) - 1][0]
    index = at + tl.arange(0, CHUNK)
    clamped = tl.minimum(index, count - 1)
    shift, token = runs[0][1] + 0 * clamped, 0 * clamped
    for i in tl.static_range(1, len(runs)):
        later = clamped >= runs[i - 1][0]
        shift, token = tl.where(later, runs[i][1], shift), tl.where(later, i * BLOCK, token)
    return clamped + shift, token, index < count


@triton.jit
def load_corrections(side, S: tl.constexpr, begin, chunk):
    """(token within the tile, channel, value minus dequantized code) of a chunk of `outlier_chunk`; the correction is 0
    where not valid."""
    D: tl.constexpr = S.dim
    slot, first, valid = chunk
    list_start = begin // S.outlier_block * S.outliers
    index = tl.load(side.outliers.index + list_start + slot).to(tl.uint16, bitcast=True).to(tl.uint32)
    token, channel = (first.to(tl.uint32) + index // D).to(tl.int32), (index % D).to(tl.int32)
    value = tl.load(side.outliers.value + list_start + slot).to(tl.float32)
    every = tl.full([CHUNK], True, tl.int1)
    decoded = S.element(side.packed, S, (begin + token).to(tl.uint32), channel, every)
    return token, channel, tl.where(valid, value - decoded, 0.0)
