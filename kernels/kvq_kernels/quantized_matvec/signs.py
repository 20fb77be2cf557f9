"""Uniform codes as in `decode_attention.fold`, of every mode: zero-point, level, a sign bit per number, hybrid.

What a group adds to its numbers is one zero-point whatever its mode: z, -level s or 0, chosen once per group. A
number's sign bit becomes the float16 sign of its code by shifts and one `or`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.fold import field_group, fields, plane
from kvq_kernels.decode_attention.spec import get


@triton.constexpr_function
def folds(spec, tokens):
    """Whether tiles of `tokens` tokens can be read so: one scale per channel of a tile, or per token of a plane."""
    if spec.bits == 3 and spec.dim % 32:
        return False
    if spec.axis == "channel":
        return spec.group % tokens == 0
    return spec.group % spec.words == 0 and spec.dim * spec.bits % 32 == 0


@triton.constexpr_function
def shifts_zero(spec):
    """Whether groups add anything to their numbers."""
    return spec.shifted or spec.hybrid or spec.level > 0


@triton.jit
def scale_zero_sign(side, S: tl.constexpr, place, seen):
    """float32 scales, float32 zero-points and integer words of sign bits at `place`; of the latter two, what there is
    not stands as the scales."""
    raw = tl.load(side[1] + place, mask=seen, other=0.0)
    s = raw.to(tl.float32)
    zero, word = s, raw
    if get(S, "sign_bits") > 0:
        word = tl.load(side[3] + place, mask=seen, other=0)
    if get(S, "hybrid"):
        asymmetric = raw.to(tl.int16, bitcast=True) < 0
        s = tl.abs(s)
        if get(S, "sign_bits") > 0:
            zero = tl.where(asymmetric, word.to(tl.float32, bitcast=True), 0.0)
            word = tl.where(asymmetric, 0, word)
        else:
            z = tl.load(side[2] + place, mask=seen, other=0.0).to(tl.float32)
            zero = tl.where(asymmetric, z, s * (-get(S, "level")))
    elif get(S, "shifted"):
        zero = tl.load(side[2] + place, mask=seen, other=0.0).to(tl.float32)
    elif get(S, "level") > 0:
        zero = s * (-get(S, "level"))
    return s, zero, word


@triton.constexpr_function
def first_bit(spec, field, sub, keys):
    """Where the sign bits of a plane's elements number `sub` of their words begin in their group's word."""
    return (field + fields(spec, keys) * sub) * spec.words % spec.group


@triton.jit
def signed(codes, bits):
    """float16 codes, negative where bit 0 of the integers `bits` is set."""
    sign = (bits << 15).to(tl.int16)
    return (codes.to(tl.int16, bitcast=True) | sign).to(tl.float16, bitcast=True)


@triton.jit
def plane_of_tokens(
    low, high, word, element_word, S: tl.constexpr, KEYS: tl.constexpr, field: tl.constexpr, sub: tl.constexpr
):
    """A plane [N, width] (see `fold.plane`) whose groups are per token. word: of the group's sign bits [N];
    element_word [1, width]: the number of each element's word."""
    x = plane(low, high, S, field)
    if get(S, "sign_bits") > 0:
        BIT: tl.constexpr = first_bit(S, field, sub, KEYS)
        x = signed(x, (word[:, None] >> element_word.to(word.dtype)) >> BIT)
    return x


@triton.jit
def plane_of_channels(low, high, word, member, S: tl.constexpr, field: tl.constexpr):
    """A plane [N, width] whose groups are per channel. word: of sign bits [width]; member [N]: tokens' bits."""
    x = plane(low, high, S, field)
    if get(S, "sign_bits") > 0:
        x = signed(x, word[None, :] >> member[:, None].to(word.dtype))
    return x


@triton.constexpr_function
def of_group(spec, field, sub, keys, group):
    return field_group(spec, field, sub, keys) == group
