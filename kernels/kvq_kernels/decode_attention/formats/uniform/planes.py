"""Uniform codes as MMA operands: the arithmetic shared by `keys.py` and `values.py`.

Codes are multiplied without a conversion to float: code << r, read as the low bits of a float16, is the subnormal
number code 2^(r - 24). Scales and zero-points are applied to queries, weights, scores or sums instead.

Two words of neighbouring tokens (or channels) are merged to 32-bit *pairs*: one of their low halves, one of their high
halves. One mask then yields field f of both words as two float16 numbers. r is the field's own position where the code
ends below bit 10, so that most fields need no shift. A *plane* is the result of one mask over all words: the same
field(s) of each.

Numbers are loaded by the threads that hold them as MMA operands: for keys 8 tokens x 4 threads of neighbouring words,
for values 8 threads of words x 4 of tokens. Triton assigns the last axis of a load to a thread's registers and earlier
axes to threads, so tensors have four axes here (see `layout_hints.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load

if TYPE_CHECKING:
    from kvq_kernels.decode_attention.formats.uniform import UniformSpec

#: The sign bits of both halves of a pair, as an int32.
SIGN_MASK = tl.constexpr(0x80008000 - (1 << 32))


@triton.constexpr_function
def half_fields(spec: UniformSpec) -> int:
    """Fields of half a word."""
    return 16 // spec.field_bits


@triton.constexpr_function
def group_fields(spec: UniformSpec) -> int:
    """Fields of half a word that share a scale."""
    return half_fields(spec) if spec.axis == "channel" else min(half_fields(spec), spec.group // spec.words)


@triton.constexpr_function
def token_threads(keys: bool) -> int:
    """Threads that share the words of a token."""
    return 4 if keys else 8


@triton.constexpr_function
def words_per_thread(spec: UniformSpec, keys: bool) -> int:
    """Neighbouring words of a token in one thread."""
    return min(2 if pairs_within_word(spec, keys) else 4, triton.next_power_of_2(-(-spec.words // token_threads(keys))))


@triton.constexpr_function
def pairs_within_word(spec: UniformSpec, keys: bool) -> bool:
    """Whether pairs of keys are two fields of one word, however many words there are: with signs per token, the two
    sign bits are then mostly half a word of signs apart and one shift moves both into place."""
    return keys and spec.axis == "token" and spec.sign_bits > 0


@triton.constexpr_function
def word_runs(spec: UniformSpec, keys: bool) -> int:
    """Loads that the words of a token take."""
    return -(-spec.words // (token_threads(keys) * words_per_thread(spec, keys)))


@triton.constexpr_function
def field_shares(spec: UniformSpec, keys: bool) -> int:
    """Into how many shares a word's fields are split where there are too few words: for keys among the halves of a
    pair, for values among threads."""
    if keys:
        return 2 if words_per_thread(spec, keys) == 1 or pairs_within_word(spec, keys) else 1
    return max(1, 8 // triton.next_power_of_2(spec.words))


@triton.constexpr_function
def fields_per_plane(spec: UniformSpec, keys: bool) -> int:
    """Fields that a plane takes so that its product has 16 channels."""
    if keys:
        return 2 if words_per_thread(spec, keys) * field_shares(spec, keys) == 2 else 1
    return 2 if words_per_thread(spec, keys) == 1 else 1


@triton.constexpr_function
def plane_count(spec: UniformSpec, keys: bool) -> int:
    """Planes of a token."""
    return word_runs(spec, keys) * 2 * half_fields(spec) // (field_shares(spec, keys) * fields_per_plane(spec, keys))


@triton.constexpr_function
def plane_position(spec: UniformSpec, keys: bool, plane: int) -> tuple[int, int, int]:
    """(run of words, half of the word, first field) of a plane."""
    unshared = half_fields(spec) // field_shares(spec, keys)
    first = plane * fields_per_plane(spec, keys)
    group_part = group_fields(spec) // field_shares(spec, keys)
    field = first % unshared
    position = field // group_part * group_fields(spec) + field % group_part
    return first // (2 * unshared), first // unshared % 2, position


@triton.constexpr_function
def plane_group(spec: UniformSpec, keys: bool, plane: int) -> int:
    """Group of channels of a plane (axis "token")."""
    _, half, field = plane_position(spec, keys, plane)
    return (field + half_fields(spec) * half) * spec.words // spec.group


@triton.constexpr_function
def plane_bit(spec: UniformSpec, keys: bool, plane: int) -> int:
    """First bit of a plane in the word of signs of its group (axis "token")."""
    run, half, field = plane_position(spec, keys, plane)
    bit = (field + half_fields(spec) * half) * spec.words % spec.group
    return bit + run * token_threads(keys) * words_per_thread(spec, keys)


@triton.constexpr_function
def unshifted_fields(spec: UniformSpec) -> int:
    """Fields that end below bit 10, the top of float16's subnormal range."""
    return 4 if spec.bits == 3 else 10 // spec.bits


@triton.constexpr_function
def field_shift(spec: UniformSpec, field: int) -> int:
    """How far pairs are shifted right for a field, which is then at `field_offset`."""
    return field // unshifted_fields(spec) * unshifted_fields(spec) * spec.field_bits


@triton.constexpr_function
def field_offset(spec: UniformSpec, field: int) -> int:
    """Bit of a half word at which a field's code is read."""
    return field % unshifted_fields(spec) * spec.field_bits


@triton.constexpr_function
def field_scale(spec: UniformSpec, field: int) -> float:
    """2^-`field_offset`: times SUBNORMAL_SCALE, turns a field's float16 numbers into its codes."""
    return 2.0 ** -field_offset(spec, field)


@triton.constexpr_function
def both_halves(mask: int) -> int:
    """The mask for both halves of a pair, as an int32."""
    return mask | mask << 16


@triton.jit
def load_words(packed, S: tl.constexpr, begin, line, static_line, word, FIRST: tl.constexpr):
    """(words, third bits) of tokens begin + line + static_line: int32 words FIRST + word, 0 beyond the last.

    Third bits of 3-bit codes are aligned with the words of the same channels, two bits apart as the low two are; of
    other codes they are the words again. Constants (static_line, FIRST) are added last, to become part of the
    instructions.
    """
    W: tl.constexpr = S.words
    ROW: tl.constexpr = S.row
    base = packed.codes + begin * ROW
    PARTIAL: tl.constexpr = word.shape[1] * word.shape[2] * word.shape[3] > W - FIRST
    mask = word < W - FIRST if PARTIAL else None
    low = load(base + (line * ROW + word), static_line * ROW + FIRST, mask)
    if S.bits == 3:
        THIRDS: tl.constexpr = W // 2
        third = load(base + (line * ROW + (word + FIRST) % THIRDS), static_line * ROW + W, mask)
        return low, third >> ((word + FIRST) // THIRDS)
    else:
        return low, low


@triton.jit
def pair_up(first, second):
    """(low halves, high halves) of two int32 words, the first word's in the low half."""
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def field_codes(pairs, thirds, S: tl.constexpr, field: tl.constexpr):
    """int32: both codes of a field of each pair, at `field_offset` of their halves."""
    SHIFT: tl.constexpr = field_shift(S, field)
    OFFSET: tl.constexpr = field_offset(S, field)
    codes = (pairs >> SHIFT) & both_halves(((1 << S.field_bits) - 1) << OFFSET)
    if S.bits == 3:
        shifted = thirds << 2 if SHIFT == 0 else thirds >> (SHIFT - 2)
        codes |= shifted & both_halves(4 << OFFSET)
    return codes


@triton.jit
def pairs_to_float(codes, T: tl.constexpr):
    """[..., 2]: both halves of each pair as float16 bits, in type T."""
    low, high = codes.to(tl.int16), (codes >> 16).to(tl.int16)
    return tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)).to(T)


@triton.constexpr_function
def has_zero_term(spec: UniformSpec) -> bool:
    """Whether dequantization adds anything to code times scale."""
    return spec.has_zero or spec.hybrid or spec.level > 0


@triton.constexpr_function
def zero_scale(spec: UniformSpec) -> float:
    """Factor from the stored number to the zero-point: -level if the scale is stored, else 1."""
    return 1.0 if spec.has_zero or spec.hybrid else -spec.level


@triton.jit
def asymmetric(raw):
    """int32: all bits set where a hybrid's group is asymmetric, else 0. The sign bit of the 16-bit scale says so, also
    that of a constant group's minus zero."""
    return raw.to(tl.int16, bitcast=True).to(tl.int32) >> 31


@triton.jit
def scale_magnitudes(raw, S: tl.constexpr):
    """Scales of stored ones, whose sign in a hybrid is the group's mode."""
    return tl.abs(raw) if S.hybrid else raw


@triton.jit
def zero_points(raw, stored, S: tl.constexpr):
    """Zero-points without `zero_scale`, from stored scales and numbers at `zero_pointer`."""
    if S.hybrid:
        return (stored & asymmetric(raw)).to(tl.float32, bitcast=True)
    else:
        return stored


@triton.constexpr_function
def zero_source(spec: UniformSpec) -> str:
    """Which tensor zero-points are loaded from: "sign", "zero" or, in units of the scale, "scale"."""
    return "sign" if spec.hybrid else "zero" if spec.has_zero else "scale"


@triton.jit
def zero_pointer(packed, S: tl.constexpr):
    """Pointer of the tensor that zero-points are loaded from."""
    return packed.sign if S.hybrid else packed.zero if S.has_zero else packed.scale


@triton.jit
def sign_words(raw, words, S: tl.constexpr):
    """int32 words of sign bits; 0 for asymmetric groups of a hybrid."""
    if S.hybrid:
        return words & ~asymmetric(raw)
    else:
        return words.to(tl.int32)


@triton.jit
def pair_signs(low, high, bit):
    """int32: bit `bit` of the words whose halves are `low` and `high` (of `pair_up`), as the sign bits of two codes."""
    return (tl.where(bit < 16, low, high) << (15 - bit % 16)) & SIGN_MASK
