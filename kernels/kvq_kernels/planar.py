"""Planar packing of codes in int32 words, in kernels.

Channel c of a token is in word c % W at bit `bits * (c // W)`. 3-bit codes are packed as their low two bits, followed
by their high bits. A tile's columns are ordered field by field, each field padded to a power of two of words, so that a
token's words are sums over fields.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def low_bits(bits: int) -> int:
    """Bits of a code that are packed first: 2 of 3-bit codes, else all."""
    return 2 if bits == 3 else bits


@triton.constexpr_function
def low_words(bits: int, count: int) -> int:
    """Words of the `low_bits` of `count` codes."""
    return -(-count * low_bits(bits) // 32)


@triton.constexpr_function
def high_words(bits: int, count: int) -> int:
    """Words of the high bits of `count` 3-bit codes; else 0."""
    return -(-count // 32) if bits == 3 else 0


@triton.constexpr_function
def padded_words(bits: int, count: int) -> int:
    """`low_words` as a power of two."""
    return triton.next_power_of_2(low_words(bits, count))


@triton.constexpr_function
def columns(bits: int, count: int) -> int:
    """Columns of a tile of `count` channels."""
    return 32 // low_bits(bits) * padded_words(bits, count)


@triton.jit
def column_channels(BITS: tl.constexpr, COUNT: tl.constexpr):
    """Channel of each column, int32; COUNT or more for padding."""
    PADDED: tl.constexpr = padded_words(BITS, COUNT)
    column = tl.arange(0, columns(BITS, COUNT))
    word = column % PADDED
    return tl.where(word < low_words(BITS, COUNT), column // PADDED * low_words(BITS, COUNT) + word, COUNT)


@triton.jit
def pack_low(codes, N: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Words of low bits, int32 [N, padded_words], of codes int32 [N, columns], 0 in padding."""
    LOW: tl.constexpr = low_bits(BITS)
    PADDED: tl.constexpr = padded_words(BITS, COUNT)
    field = tl.arange(0, columns(BITS, COUNT)) // PADDED
    shifted = (codes & ((1 << LOW) - 1)) << (LOW * field)[None, :]
    return tl.sum(tl.reshape(shifted, [N, 32 // LOW, PADDED]), axis=1)


@triton.jit
def pack_high(codes, channel, word: tl.constexpr, COUNT: tl.constexpr):
    """Word `word` of the high bits of 3-bit codes int32 [N, columns]: int32 [N]."""
    HIGH: tl.constexpr = (COUNT + 31) // 32
    mask = (channel % HIGH == word) & (channel < COUNT)
    return tl.sum(tl.where(mask[None, :], ((codes >> 2) & 1) << (channel // HIGH)[None, :], 0), axis=1)
