"""Uniform codes in kernels: pointers of a row, head and page, and single numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codes import load_code, subnormal_to_float
from kvq_kernels.decode_attention.formats.shared import moved


class UniformPointers(NamedTuple):
    """A `Uniform` in a kernel."""

    codes: Any
    scale: Any
    zero: Any
    sign: Any


class UniformStrides(NamedTuple):
    """Strides of rows (None: of pages) and heads; zero and sign: None where they are the scale's."""

    codes_row: int | None
    codes_head: int
    scale_row: int | None
    scale_head: int
    zero_head: int | None
    sign_head: int | None


@triton.jit
def at_head(packed, strides, S: tl.constexpr, row, head):
    """See `SideSpec`."""
    h = head.to(tl.int64)
    if strides.codes_row is None:
        return UniformPointers(
            packed.codes + h * strides.codes_head,
            packed.scale + h * strides.scale_head,
            packed.zero + h * strides.zero_head,
            packed.sign + h * strides.sign_head,
        )
    else:
        r = row.to(tl.int64)
        group = r * strides.scale_row + h * strides.scale_head
        codes = packed.codes + r * strides.codes_row + h * strides.codes_head
        return UniformPointers(codes, packed.scale + group, packed.zero + group, packed.sign + group)


@triton.jit
def at_page(packed, S: tl.constexpr, offset):
    """See `SideSpec`."""
    zero, sign = packed.zero, packed.sign
    if S.has_zero:
        zero = moved(zero, offset)
    if S.sign_bits > 0:
        sign = moved(sign, offset)
    return UniformPointers(moved(packed.codes, offset), moved(packed.scale, offset), zero, sign)


@triton.jit
def element(packed, S: tl.constexpr, token, channel, mask):
    """See `SideSpec`: q s + z, (q - level) s, or per group of a hybrid either."""
    D: tl.constexpr = S.dim
    G: tl.constexpr = S.group
    code = load_code(packed.codes, token, channel, S.words, S.row, D, S.bits, mask)
    if S.axis == "channel":
        offset = (token // G) * D + channel
        member = token % G
    else:
        offset = token * (D // G) + channel // G
        member = channel % G
    raw = tl.load(packed.scale + offset, mask=mask, other=0.0)
    s = raw.to(tl.float32)
    if S.hybrid:
        asymmetric = raw.to(tl.int16, bitcast=True) < 0  # the sign bit: a constant group's scale is minus zero
        s = tl.abs(s)
    if S.sign_bits > 0:
        word = tl.load(packed.sign + offset, mask=mask, other=0)
        if S.hybrid:
            z = tl.where(asymmetric, word.to(tl.float32, bitcast=True), 0.0)
            word = tl.where(asymmetric, 0, word)
            return subnormal_to_float(code | _sign(word, member)) * s + z
        return subnormal_to_float(code | _sign(word, member)) * s
    elif S.has_zero:
        z = tl.load(packed.zero + offset, mask=mask, other=0.0).to(tl.float32)
        return subnormal_to_float(code) * s + z
    else:
        return (subnormal_to_float(code) - S.level) * s


@triton.jit
def _sign(word, member):
    """Bit `member` of the group's word, as the sign bit of a float16 number."""
    return ((word >> member.to(word.dtype)) & 1).to(tl.int32) << 15
