"""Reading latents: pointers to the lines of tokens, and one field of some of their words, dequantized.

`scores.py` and `sums.py` call this; a `Source` (`spec.py`) says how the tokens are stored. A line is a token's codes or
numbers. In a kernel a side is the tuple (codes, scale, zero, first, sinks, ring).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codes import SUBNORMAL_SCALE
from kvq_kernels.planar import low_bits
from kvq_kernels.rematerialize.spec import groups, in_one_group


@triton.jit
def row_pointer(pointer, row, stride):
    """The pointer advanced to a row, in 64 bits."""
    return pointer + row.to(tl.int64) * stride


@triton.jit
def token_count(length, count, S: tl.constexpr):
    """Tokens of a row in the source."""
    return length - count if S.kind == "exact" else count


@triton.jit
def token_index(index, length, count, S: tl.constexpr):
    """Position in the row of token `index` of the source."""
    SINKS: tl.constexpr = S.sinks
    if S.kind == "exact":
        return tl.where(index < tl.minimum(length, SINKS), index, index + count)
    else:
        return index + SINKS


@triton.jit
def token_lines(side, strides, row, index, count, ring_size, S: tl.constexpr):
    """Pointers [N] to the lines of tokens `index` [N] of the source."""
    SINKS: tl.constexpr = S.sinks
    if S.kind == "exact":
        recent = row_pointer(side[5], row, strides[4]) + ((index - SINKS + count) % ring_size) * S.row
        if SINKS == 0:
            return recent
        else:
            return tl.where(index < SINKS, row_pointer(side[4], row, strides[3]) + index * S.row, recent)
    else:
        return row_pointer(side[0], row, strides[0]) + index.to(tl.int64) * S.row


@triton.jit
def load_words(lines, word, S: tl.constexpr):
    """Elements `word` [R] of lines [N]: words of codes or dense numbers; 0 beyond the last."""
    return tl.load(lines[:, None] + word[None, :], mask=(word < S.words)[None, :], other=0)


@triton.jit
def field_numbers(
    words, lines, side, strides, row, begin, index, start, field, S: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """[N, R] of type T: number `field` of elements start, ..., start + R - 1 (`words` [N, R]), dequantized.

    Tokens `index` [N] are begin, begin + 1, ..., clamped to the last. Channels from `width` on are finite, no more.
    """
    if S.kind != "uniform":
        return words.to(T)
    else:
        W: tl.constexpr = S.words
        LOW: tl.constexpr = low_bits(S.bits)
        channel = field * W + start + tl.arange(0, R)
        code = (words >> (LOW * field)) & ((1 << LOW) - 1)
        if S.bits == 3:
            H: tl.constexpr = S.high
            high = tl.load(lines[:, None] + W + (channel % H)[None, :])
            code |= ((high >> (channel // H)[None, :]) & 1) << 2
        place = group_offset(begin, index, channel, field * W + start, S, N, R)
        s = tl.load(row_pointer(side[1], row, strides[1]) + place)
        z = tl.load(row_pointer(side[2], row, strides[1]) + place)
        if tl.float16 == T and s.dtype == tl.float16:
            # Bits of 1024 + code as float16: no conversion, and two numbers per instruction.
            x = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
            return x * s + z
        else:
            x = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            return (x * (s.to(tl.float32) * SUBNORMAL_SCALE) + z.to(tl.float32)).to(T)


@triton.jit
def group_offset(begin, index, channel, first_channel, S: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Offsets of scales and zero-points: [N, R]; [1, R] for one per column of the tile, [N, 1] for one per line."""
    G: tl.constexpr = S.group
    D: tl.constexpr = S.width
    if S.axis == "channel":
        column = tl.minimum(channel, D - 1)[None, :]
        if G % N == 0:
            return (begin // G).to(tl.int64) * D + column
        else:
            return (index // G).to(tl.int64)[:, None] * D + column
    else:
        line = index.to(tl.int64)[:, None] * groups(S)
        if in_one_group(S, R):
            return line + tl.minimum(first_channel // G, groups(S) - 1)
        else:
            return line + tl.minimum(channel // G, groups(S) - 1)[None, :]
