"""Uniform codes multiplied as they are: scales and zero-points are folded into queries, weights, scores or sums.

Two words side by side give 32-bit *pairs*: their low halves, their high halves. One mask makes two float16 numbers of
field f of a pair: code << r, as the low bits of a float16, is the subnormal number code 2^(r - 24). No number is
converted or added to. r is the field's own place where the code ends below bit 10: then there is no shift either.

Numbers are loaded by the threads that hand them to the matrix unit: of the keys, 8 tokens by 4 threads with words that
follow each other, of the values, 8 threads with words by 4 with tokens. Triton gives the last axis of a load to a
thread and those before it to threads, which is why tensors have four axes here. A *plane* is what one mask makes of
all words: the same fields of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.spec import get, row_width

#: What the codes are too small by.
UNIT = tl.constexpr(16777216.0)
#: The sign bits of both halves of a pair, as an int32.
SIGNS = tl.constexpr(0x80008000 - (1 << 32))
#: Groups of a token, at most: one product sums as many zero-points times sums of queries, which are in two parts.
GROUPS = 8


@triton.constexpr_function
def folds(spec, rope_style, tokens, keys):
    """Whether a side can be read so: scales are one per channel of a tile or one per token of a plane."""
    if spec.kind != "uniform" or spec.slots or (keys and rope_style != "none"):
        return False
    if spec.dim * spec.field_bits % 32 or (spec.bits == 3 and spec.dim % 32) or tokens % 16:
        return False
    if spec.sign_bits not in (0, 16, 32):
        return False
    if spec.axis == "channel":
        whole = spec.group % tokens == 0
    else:
        whole = spec.group % spec.words == 0 and spec.dim // spec.group <= GROUPS
    return whole and group_fields(spec) % (beside(spec, keys) * shares(spec, keys)) == 0


@triton.constexpr_function
def half_fields(spec):
    """Fields of half a word."""
    return 16 // spec.field_bits


@triton.constexpr_function
def group_fields(spec):
    """Fields of half a word that have the same scale."""
    return half_fields(spec) if spec.axis == "channel" else min(half_fields(spec), spec.group // spec.words)


@triton.constexpr_function
def threads(keys):
    """That share the words of a token."""
    return 4 if keys else 8


@triton.constexpr_function
def thread_words(spec, keys):
    """Words of a token that a thread has side by side."""
    return min(2 if within_words(spec, keys) else 4, triton.next_power_of_2(-(-spec.words // threads(keys))))


@triton.constexpr_function
def within_words(spec, keys):
    """Whether pairs of keys are two fields of one word, whatever the number of words: then the two mostly have their
    sign bits half a word of signs apart, which one shift takes to where they belong."""
    return keys and spec.axis == "token" and spec.sign_bits > 0


@triton.constexpr_function
def runs(spec, keys):
    """Runs of words that a token consists of."""
    return -(-spec.words // (threads(keys) * thread_words(spec, keys)))


@triton.constexpr_function
def shares(spec, keys):
    """Among how many a word's fields are shared where there are too few words: of keys the two halves of a pair, of
    values threads."""
    if keys:
        return 2 if thread_words(spec, keys) == 1 or within_words(spec, keys) else 1
    return max(1, 8 // triton.next_power_of_2(spec.words))


@triton.constexpr_function
def beside(spec, keys):
    """Fields that a plane takes, so that a product sums over 16 channels, or gives 16 channels' sums."""
    if keys:
        return 2 if thread_words(spec, keys) * shares(spec, keys) == 2 else 1
    return 2 if thread_words(spec, keys) == 1 else 1


@triton.constexpr_function
def plane_count(spec, keys):
    return runs(spec, keys) * 2 * half_fields(spec) // (shares(spec, keys) * beside(spec, keys))


@triton.constexpr_function
def plane_place(spec, keys, number):
    """(run, half, field) of a plane; those after it in the plane follow."""
    own = half_fields(spec) // shares(spec, keys)  # fields that are not another's share
    number *= beside(spec, keys)
    part = group_fields(spec) // shares(spec, keys)
    field = number % own
    return number // (2 * own), number // own % 2, field // part * group_fields(spec) + field % part


@triton.constexpr_function
def plane_group(spec, keys, number):
    """The group of channels of a plane (axis "token")."""
    _, half, field = plane_place(spec, keys, number)
    return (field + half_fields(spec) * half) * spec.words // spec.group


@triton.constexpr_function
def plane_bit(spec, keys, number):
    """Of the signs of a plane's group, the first of the plane's (axis "token")."""
    run, half, field = plane_place(spec, keys, number)
    bit = (field + half_fields(spec) * half) * spec.words % spec.group
    return bit + run * threads(keys) * thread_words(spec, keys)


@triton.constexpr_function
def window(spec):
    """Fields that end below bit 10."""
    return 4 if spec.bits == 3 else 10 // spec.bits


@triton.constexpr_function
def field_shift(spec, field):
    """How far pairs are shifted for a field; the rest of its place is `field_place`."""
    return field // window(spec) * window(spec) * spec.field_bits


@triton.constexpr_function
def field_place(spec, field):
    return field % window(spec) * spec.field_bits


@triton.constexpr_function
def field_unit(spec, field):
    """What the numbers of a field are to be multiplied by, less `UNIT`."""
    return 2.0 ** -field_place(spec, field)


@triton.constexpr_function
def twice(mask):
    """For both halves of a pair, as an int32."""
    return mask | mask << 16


@triton.jit
def load_words(side, S: tl.constexpr, begin, line, own, thread, FIRST: tl.constexpr):
    """(words, third bits) of tokens begin + line + own, int32 words FIRST + thread, 0 beyond the last. Of 3-bit codes
    the third bits are those of the same channels, two bits apart as the low two are; else those words again.

    own: what is known when this is compiled comes last, so that it becomes part of the instructions.
    """
    W: tl.constexpr = get(S, "words")
    ROW: tl.constexpr = row_width(S)
    base = side[0] + begin * ROW
    SOME: tl.constexpr = thread.shape[1] * thread.shape[2] * thread.shape[3] > W - FIRST
    seen = thread < W - FIRST if SOME else None
    low = load(base + (line * ROW + thread), own * ROW + FIRST, seen)
    if get(S, "bits") == 3:
        THIRDS: tl.constexpr = W // 2
        third = load(base + (line * ROW + (thread + FIRST) % THIRDS), own * ROW + W, seen)
        return low, third >> ((thread + FIRST) // THIRDS)
    else:
        return low, low


@triton.jit
def pair_up(first, second):
    """(low halves, high halves) of two int32 words, the first's in the low half."""
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def field_codes(pairs, thirds, S: tl.constexpr, field: tl.constexpr):
    """int32: the two codes of a field of each pair, at `field_place` of their halves."""
    SHIFT: tl.constexpr = field_shift(S, field)
    PLACE: tl.constexpr = field_place(S, field)
    codes = (pairs >> SHIFT) & twice(((1 << get(S, "field_bits")) - 1) << PLACE)
    if get(S, "bits") == 3:
        shifted = thirds << 2 if SHIFT == 0 else thirds >> (SHIFT - 2)
        codes |= shifted & twice(4 << PLACE)
    return codes


@triton.jit
def numbers(codes, T: tl.constexpr):
    """[..., 2]: the two numbers of each pair of codes."""
    low, high = codes.to(tl.int16), (codes >> 16).to(tl.int16)
    return tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)).to(T)


@triton.constexpr_function
def adds_zero(spec):
    """Whether groups add anything to their numbers."""
    return spec.shifted or spec.hybrid or spec.level > 0


@triton.constexpr_function
def zero_scale(spec):
    """What is kept as the zero-point is to be multiplied by this: where all groups have a level, that is the scale."""
    return 1.0 if spec.shifted or spec.hybrid else -spec.level


@triton.jit
def asymmetric(raw):
    """int32: all bits set where groups of a hybrid are asymmetric, else none: the sign of their 16-bit scale says so,
    which a constant group's minus zero has, too."""
    return raw.to(tl.int16, bitcast=True).to(tl.int32) >> 31


@triton.jit
def scales(raw, S: tl.constexpr):
    """Scales, of those that are kept: in a hybrid their sign says something else."""
    return tl.abs(raw) if get(S, "hybrid") else raw


@triton.jit
def zeros(raw, kept, S: tl.constexpr):
    """Zero-points less by `zero_scale`, of the scales as they are kept and of what `zero_part` has at their places."""
    if get(S, "hybrid"):
        if get(S, "sign_bits") > 0:
            return (kept & asymmetric(raw)).to(tl.float32, bitcast=True)
        else:
            level = tl.abs(raw).to(tl.float32) * (-get(S, "level"))
            return tl.where(asymmetric(raw) < 0, kept.to(tl.float32), level)
    else:
        return kept


@triton.constexpr_function
def zero_part(spec):
    """Which of a side's pointers zero-points are read from."""
    return 3 if spec.hybrid and spec.sign_bits else 2 if spec.shifted else 1


@triton.jit
def signs(raw, words, S: tl.constexpr):
    """Words of sign bits, int32; asymmetric groups of a hybrid have none."""
    if get(S, "hybrid"):
        return words & ~asymmetric(raw)
    else:
        return words.to(tl.int32)


@triton.jit
def sign_pairs(low, high, bit):
    """int32: bit number `bit` of the words whose low and high halves `pair_up` gave, as the signs of two codes."""
    return (tl.where(bit < 16, low, high) << (15 - bit % 16)) & SIGNS
