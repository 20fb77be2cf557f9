"""Codebook codes in kernels: pointers of a row, head and page, and single numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codes import load_code
from kvq_kernels.decode_attention.formats.shared import moved


class CodebookPointers(NamedTuple):
    """A `Codebook` in a kernel."""

    codes: Any
    centroids: Any
    mean: Any
    std: Any
    token_scale: Any
    token_zero: Any


class CodebookStrides(NamedTuple):
    """Strides of rows (None: of pages) and heads of codes, and of rows of the tokens' scales."""

    codes_row: int | None
    codes_head: int
    token_row: int | None


@triton.jit
def at_head(packed, strides, S: tl.constexpr, row, head):
    """See `SideSpec`."""
    h = head.to(tl.int64)
    SIZE: tl.constexpr = S.dim // S.book_channels * S.entries * S.tokens * S.channels
    book = 0 * h if S.shared_heads else h * SIZE
    codes = packed.codes + h * strides.codes_head
    scale, zero = packed.token_scale, packed.token_zero
    if strides.codes_row is not None:
        r = row.to(tl.int64)
        codes = packed.codes + r * strides.codes_row + h * strides.codes_head
        scale, zero = scale + r * strides.token_row, zero + r * strides.token_row
    channels = h * S.dim
    return CodebookPointers(codes, packed.centroids + book, packed.mean + channels, packed.std + channels, scale, zero)


@triton.jit
def at_page(packed, S: tl.constexpr, offset):
    """See `SideSpec`."""
    scale, zero = packed.token_scale, packed.token_zero
    if S.token_scaled:
        scale, zero = moved(scale, offset), moved(zero, offset)
    return CodebookPointers(moved(packed.codes, offset), packed.centroids, packed.mean, packed.std, scale, zero)


@triton.jit
def element(packed, S: tl.constexpr, token, channel, mask):
    """See `SideSpec`: centroid std + mean, then the token's scale and zero-point."""
    D: tl.constexpr = S.dim
    L: tl.constexpr = S.tokens
    C: tl.constexpr = S.channels
    N: tl.constexpr = S.entries
    if S.bits == 8:
        code = tl.load(packed.codes + ((token // L) * (D // C) + channel // C), mask=mask, other=0).to(tl.int32)
    else:
        code = load_code(packed.codes, token // L, channel // C, S.words, S.row, D // C, S.bits, mask)
    entry = ((channel // S.book_channels) * N + code) * (L * C)
    x = tl.load(packed.centroids + (entry + (token % L) * C + channel % C), mask=mask, other=0.0).to(tl.float32)
    if S.has_std:
        x = x * tl.load(packed.std + channel, mask=channel < D, other=0.0)
    if S.has_zero:
        x += tl.load(packed.mean + channel, mask=channel < D, other=0.0)
    if S.token_scaled:
        x *= tl.load(packed.token_scale + token, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(packed.token_zero + token, mask=mask, other=0.0).to(tl.float32)
    return x
