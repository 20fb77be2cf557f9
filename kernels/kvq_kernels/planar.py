"""Planar packing inside a kernel.

Channel c of a token is in word c % W at bit `bits * (c // W)`; of 3-bit codes the low two bits are packed so, then the
high bits. A tile's columns are ordered field by field, each padded to a power of two of words, so that the words of a
token are sums over fields.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def low_bits(bits):
    """Bits of a code that are packed first."""
    return 2 if bits == 3 else bits


@triton.constexpr_function
def low_words(bits, count):
    """Words of these, of `count` codes."""
    return -(-count * low_bits(bits) // 32)


@triton.constexpr_function
def high_words(bits, count):
    """Words of the high bits of 3-bit codes."""
    return -(-count // 32) if bits == 3 else 0


@triton.constexpr_function
def padded_words(bits, count):
    return triton.next_power_of_2(low_words(bits, count))


@triton.constexpr_function
def columns(bits, count):
    """Columns of a tile."""
    return 32 // low_bits(bits) * padded_words(bits, count)


@triton.jit
def column_channels(BITS: tl.constexpr, COUNT: tl.constexpr):
    """The channel of each column, int32; COUNT or more where there is none."""
    PADDED: tl.constexpr = padded_words(BITS, COUNT)
    column = tl.arange(0, columns(BITS, COUNT))
    word = column % PADDED
    return tl.where(word < low_words(BITS, COUNT), column // PADDED * low_words(BITS, COUNT) + word, COUNT)


@triton.jit
def pack_low(codes, N: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr):
    """int32 [N, columns] of codes, 0 where there is no channel -> the first words, int32 [N, padded words]."""
    LOW: tl.constexpr = low_bits(BITS)
    PADDED: tl.constexpr = padded_words(BITS, COUNT)
    field = tl.arange(0, columns(BITS, COUNT)) // PADDED
    shifted = (codes & ((1 << LOW) - 1)) << (LOW * field)[None, :]
    return tl.sum(tl.reshape(shifted, [N, 32 // LOW, PADDED]), axis=1)


@triton.jit
def pack_high(codes, channel, word: tl.constexpr, COUNT: tl.constexpr):
    """Word number `word` of the high bits of 3-bit codes, int32 [N]."""
    HIGH: tl.constexpr = (COUNT + 31) // 32
    own = (channel % HIGH == word) & (channel < COUNT)
    return tl.sum(tl.where(own[None, :], ((codes >> 2) & 1) << (channel // HIGH)[None, :], 0), axis=1)
