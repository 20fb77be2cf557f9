"""Pointers at packed tokens in the kernel: in rows, and in pages (`decode_attention.parts.Pages`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_row(pointers, strides, heads, room, row, head):
    """Pointers at one row and head; the last one is of gains, without gaps between rows of so many heads."""
    moved = ()
    for i in tl.static_range(len(pointers) - 1):
        moved = moved + (pointers[i] + (row.to(tl.int64) * strides[2 * i] + head.to(tl.int64) * strides[2 * i + 1]),)
    first = (row * heads + head).to(tl.int64) * (room // 4)
    return moved + (pointers[len(pointers) - 1] + first,)


@triton.jit
def at_paged_head(pointers, strides, gain_stride, head):
    """Pointers at one head of page 0: codes of all parts, the gains last. strides: of (page, head) of codes."""
    moved = ()
    for i in tl.static_range(len(pointers) - 1):
        moved = moved + (pointers[i] + head.to(tl.int64) * strides[2 * i + 1],)
    return moved + (pointers[len(pointers) - 1] + head.to(tl.int64) * gain_stride,)


@triton.jit
def at_tile(pointers, pages, tile, PAGE: tl.constexpr, N: tl.constexpr):
    """(pointers, tile): at the page with the row's tile `tile` of N tokens, and the tile's number within the page.

    pages: (pointer at the row's block table, bytes of a page). PAGE: tokens of a page, whole tiles; 0: a row is one run
    of memory, and nothing is changed.
    """
    if PAGE == 0:
        return pointers, tile
    else:
        TILES: tl.constexpr = PAGE // N
        offset = tl.load(pages[0] + tile // TILES).to(tl.int64) * pages[1]
        moved = ()
        for i in tl.static_range(len(pointers)):
            at = pointers[i].to(tl.pointer_type(tl.uint8), bitcast=True) + offset
            moved = moved + (at.to(pointers[i].dtype, bitcast=True),)
        return moved, tile % TILES


@triton.jit
def slot_of(slots, row):
    """Index of a row in sinks and ring."""
    return row if slots is None else tl.load(slots + row)
