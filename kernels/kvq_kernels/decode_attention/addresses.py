"""A side in kernels: its pointers, moved to a row, a kv head and the page of a token.

Missing tensors are replaced by others, see `Format.pointers`. Offsets within a row and head are 32-bit, bases 64-bit.
With pages (`parts.Pages`, which `pages.py` checks on the host), all other code reads a cell where it else reads a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.shared import moved


class WindowPointers(NamedTuple):
    """Sinks, ring buffer of recent tokens, and the norm that packed numbers were divided by."""

    sinks: Any
    ring: Any
    norm: Any


class WindowStrides(NamedTuple):
    """Strides of a row and of a head of each of `WindowPointers`."""

    sinks_row: int
    sinks_head: int
    ring_row: int
    ring_head: int
    norm_row: int
    norm_head: int


class OutlierPointers(NamedTuple):
    """`parts.Outliers` in a kernel."""

    index: Any
    value: Any
    start: Any


class OutlierStrides(NamedTuple):
    """Strides of a row and of a head of index and value, and of start's row; of rows None with pages."""

    row: int | None
    head: int
    start_row: int | None


class PagePointers(NamedTuple):
    """`parts.Pages` in a kernel: the block table, and the slots of all rows (None: the rows)."""

    table: Any
    slots: Any


class PageStrides(NamedTuple):
    """Strides of a page and of a cell in bytes, and of a row of the block table."""

    page: int
    cell: int
    table_row: int


class RowPages(NamedTuple):
    """A row's block table, and the strides of pages and cells in bytes."""

    table: Any
    page: Any
    cell: Any


class SidePointers(NamedTuple):
    """Keys or values in a kernel. packed: the format's pointers. pages: `PagePointers`, of a row `RowPages`; None on
    the host and () in a kernel: packed tokens of a row are one run of memory."""

    packed: Any
    windows: Any
    outliers: Any
    pages: Any


class SideStrides(NamedTuple):
    """Strides of a `SidePointers`."""

    packed: Any
    windows: WindowStrides
    outliers: OutlierStrides
    pages: PageStrides | None


@triton.jit
def at_head(side, strides, S: tl.constexpr, row, head):
    """The side's pointers at one row and kv head."""
    return at_stored_head(side, strides, S, row, head, head)


@triton.jit
def at_stored_head(side, strides, S: tl.constexpr, row, head, stored):
    """`at_head` for a kv head that is number `stored` of those that the side's codes hold; windows and outliers are of
    all heads."""
    h = head.to(tl.int64)
    lists, step = side.outliers, strides.outliers
    packed = S.at_head(side.packed, strides.packed, S, row, stored)
    if S.cell == 0:
        r = row.to(tl.int64)
        sparse = r * step.row + h * step.head
        start = lists.start + r * step.start_row + h
        outliers = OutlierPointers(lists.index + sparse, lists.value + sparse, start)
        return SidePointers(packed, _at_windows(side.windows, strides.windows, row, head), outliers, ())
    else:
        outliers = OutlierPointers(lists.index + h * step.head, lists.value + h * step.head, lists.start + h)
        slot = row if side.pages.slots is None else tl.load(side.pages.slots + row)
        table = side.pages.table + row.to(tl.int64) * strides.pages.table_row
        pages = RowPages(table, strides.pages.page, strides.pages.cell)
        return SidePointers(packed, _at_windows(side.windows, strides.windows, slot, head), outliers, pages)


@triton.jit
def _at_windows(windows, strides, slot, head):
    """The windows' pointers at one slot and kv head."""
    r, h = slot.to(tl.int64), head.to(tl.int64)
    sinks = windows.sinks + r * strides.sinks_row + h * strides.sinks_head
    ring = windows.ring + r * strides.ring_row + h * strides.ring_head
    return WindowPointers(sinks, ring, windows.norm + r * strides.norm_row + h * strides.norm_head)


@triton.jit
def page_of(side, S: tl.constexpr, cell, mask):
    """Page with the row's cell `cell`, int32; 0 without pages or where not `mask`."""
    if S.cell == 0:
        return 0
    else:
        return tl.load(side.pages.table + cell // S.cells, mask=mask, other=0)


@triton.jit
def tile_page(side, S: tl.constexpr, tile, N: tl.constexpr, last):
    """Page with the row's tile `tile` of N tokens; 0 without pages, and from tile `last` on."""
    if S.cell == 0:
        return 0
    else:
        return page_of(side, S, tile // (S.cell // N), tile < last)


@triton.jit
def at_tile(side, S: tl.constexpr, tile, N: tl.constexpr, page, start):
    """(pointers, tile, start) of the row's tile `tile` of N tokens, which is in page `page`: the side's pointers at its
    cell, its number within the cell, and the position of the cell's first token. Without pages, they are unchanged.

    start: position of the row's place 0, without pages of its first packed token.
    """
    if S.cell == 0:
        return side, tile, start
    else:
        TILES: tl.constexpr = S.cell // N
        within = tile % TILES
        if S.opaque_tiles:
            within += tl.minimum(page, 0)  # opaque zero: fences must depend on the tile's number
        return at_cell(side, S, page, tile // TILES), within, start + (tile - within) * N


@triton.jit
def at_tokens(side, S: tl.constexpr, token, mask):
    """(pointers, token): the side's pointers at the cells of packed tokens `token`, and their numbers within these.
    mask: which tokens the row has packed."""
    if S.cell == 0:
        return side, token
    else:
        place = token + S.first
        cell = place // S.cell
        return at_cell(side, S, page_of(side, S, cell, mask), cell), place % S.cell


@triton.jit
def at_cell(side, S: tl.constexpr, page, cell):
    """The side's pointers at the row's cell `cell`, which is in page `page`."""
    offset = page.to(tl.int64) * side.pages.page
    if S.cells > 1:
        offset += tl.cast(cell % S.cells, tl.int64) * side.pages.cell
    outliers = side.outliers
    if S.pooled_heads > 0:
        outliers = OutlierPointers(
            moved(outliers.index, offset), moved(outliers.value, offset), moved(outliers.start, offset)
        )
    elif S.outliers > 0:
        outliers = OutlierPointers(moved(outliers.index, offset), moved(outliers.value, offset), outliers.start)
    return SidePointers(S.at_page(side.packed, S, offset), side.windows, outliers, ())
