"""Address arithmetic of pages (`parts.Pages`) in kernels: a side's pointers at the page of a token.

`pages.py` checks pages on the host. All other code reads a run of memory, which with pages is a cell, not a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_paged_head(side, strides, S: tl.constexpr, row, head, stored, table, slots):
    """`dequantize.at_stored_head` of a side with pages: pointers at page 0, then 12 the row's block table, 13 and 14
    the strides of pages and cells in bytes. strides: of `arguments.pointers`."""
    h = stored.to(tl.int64)
    codes = side[0] + h * strides[1]
    if S.kind == "codebook":
        size: tl.constexpr = S.dim // S.book_channels * S.entries * S.tokens * S.channels
        first = side[1] + (0 * h if S.shared_heads else h * size)
        zero, sign = side[2] + h * S.dim, side[3] + h * S.dim
    else:
        first, zero, sign = side[1] + h * strides[3], side[2] + h * strides[15], side[3] + h * strides[16]
    slot = (row if slots is None else tl.load(slots + row)).to(tl.int64)
    h = head.to(tl.int64)
    sinks, ring = side[6] + slot * strides[6] + h * strides[7], side[7] + slot * strides[8] + h * strides[9]
    norm = side[8] + slot * strides[10] + h * strides[11]
    index, value, start = side[9] + h * strides[13], side[10] + h * strides[13], side[11] + h
    row_table = table + row.to(tl.int64) * strides[19]
    return (
        codes, first, zero, sign, side[4], side[5], sinks, ring, norm, index, value, start,
        row_table, strides[17], strides[18],
    )  # fmt: skip


@triton.jit
def page_of(side, S: tl.constexpr, cell, mask):
    """Page with the row's cell `cell`, int32; 0 without pages or where not `mask`."""
    if S.cell == 0:
        return 0
    else:
        return tl.load(side[12] + cell // S.cells, mask=mask, other=0)


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
        if S.kind == "codebook" or S.outliers > 0:
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
    offset = page.to(tl.int64) * side[13]
    if S.cells > 1:
        offset += tl.cast(cell % S.cells, tl.int64) * side[14]
    first, zero, sign, scales, zeros = side[1], side[2], side[3], side[4], side[5]
    index, value, start = side[9], side[10], side[11]
    if S.kind == "uniform":
        first = _moved(first, offset)
        if S.has_zero:
            zero = _moved(zero, offset)
        if S.sign_bits > 0:
            sign = _moved(sign, offset)
    if S.token_scaled:
        scales, zeros = _moved(scales, offset), _moved(zeros, offset)
    if S.outliers > 0:
        index, value = _moved(index, offset), _moved(value, offset)
        if S.pooled_heads > 0:
            start = _moved(start, offset)
    codes = _moved(side[0], offset)
    return codes, first, zero, sign, scales, zeros, side[6], side[7], side[8], index, value, start


@triton.jit
def _moved(pointer, offset):
    """The pointer `offset` bytes further."""
    return (pointer.to(tl.pointer_type(tl.uint8), bitcast=True) + offset).to(pointer.dtype, bitcast=True)
