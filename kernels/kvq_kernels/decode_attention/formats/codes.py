"""Codes in words: in PyTorch, single ones in a kernel, and as float16 numbers without a conversion."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_kernels.planar import low_bits

#: 2^24: undoes the subnormal bitcast.
SUBNORMAL_SCALE = tl.constexpr(16777216.0)


@triton.jit
def subnormal_to_float(codes):
    """Integers below 1024 as float32, without a conversion: their bits as float16 are subnormal, code / 2^24. Bit 15 is
    the sign."""
    return codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * SUBNORMAL_SCALE


@triton.jit
def load_code(codes, row, column, W: tl.constexpr, ROW: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, mask):
    """Code `column` of row `row` (broadcast) in planar words, see `Uniform.codes`; 0 where not `mask`: a shift by 32 or
    more is undefined."""
    LOW: tl.constexpr = low_bits(BITS)
    word = tl.load(codes + (row * ROW + column % W), mask=mask, other=0)
    code = (word >> (LOW * (column // W) & 31)) & ((1 << LOW) - 1)
    if BITS == 3:
        HIGH: tl.constexpr = (COUNT + 31) // 32
        word = tl.load(codes + row * ROW + W + column % HIGH, mask=mask, other=0)
        code = code | (((word >> (column // HIGH & 31)) & 1) << 2)
    return code


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int64 codes `[..., count]` of planar int32 words `[..., W]`."""
    if bits == 3:
        low = -(-count // 16)
        return unpack_words(words[..., :low], 2, count) | (unpack_words(words[..., low:], 1, count) << 2)
    channel = torch.arange(count, device=words.device)
    width = words.shape[-1]
    return (words[..., channel % width].long() >> (bits * (channel // width))) & (2**bits - 1)
