"""Uniform codes as in `decode_attention.fold`, of every mode: zero-point, level, a sign bit per number, hybrid.

What a group adds to its numbers is one zero-point whatever its mode: z, -level s or 0, chosen once per group. A
number's sign bit becomes the float16 sign of its code by shifts and one `or`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.fold import element_bits, field_group, fields, width
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
        if get(S, "sign_bits") == 16:
            word = word.to(tl.int32)
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
def signed(codes, bits, BIT: tl.constexpr):
    """float16 codes, negative where bit BIT of the integers `bits` is set."""
    sign = bits << (15 - BIT) if BIT <= 15 else bits >> (BIT - 15)
    return (codes.to(tl.int16, bitcast=True) | (sign & 32768).to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def signs_of_tokens(words, S: tl.constexpr, KEYS: tl.constexpr, field: tl.constexpr):
    """For planes `field`, field + 1, ... while their groups are the same ones: integers [N, width], whose bit
    `first_bit` is the sign of the element. words: of the sign bits of all groups, [N] each."""
    SUBS: tl.constexpr = 32 // element_bits(S, KEYS)
    element = tl.arange(0, width(S, KEYS))[None, :]
    word = words[field_group(S, field, 0, KEYS)][:, None]
    if SUBS > 1:
        for sub in tl.static_range(1, SUBS):
            # The elements of one word may start at different bits of their groups' words.
            other = words[field_group(S, field, sub, KEYS)][:, None]
            word = tl.where(element % SUBS == sub, turned(other, S, KEYS, field, sub), word)
    return word >> (element // SUBS).to(word.dtype)


@triton.jit
def turned(word, S: tl.constexpr, KEYS: tl.constexpr, field: tl.constexpr, sub: tl.constexpr):
    """The word with the bits of element `sub` moved to where those of element 0 are."""
    LEFT: tl.constexpr = first_bit(S, field, 0, KEYS) - first_bit(S, field, sub, KEYS)
    if LEFT >= 0:
        return word << LEFT
    else:
        return word >> -LEFT


@triton.constexpr_function
def begins_groups(spec, field, keys):
    """Whether another plane than the one before needs other words of signs."""
    subs = range(32 // element_bits(spec, keys))
    return field == 0 or any(
        field_group(spec, field, sub, keys) != field_group(spec, field - 1, sub, keys) for sub in subs
    )


@triton.constexpr_function
def of_group(spec, field, sub, keys, group):
    return field_group(spec, field, sub, keys) == group
