"""Lookup in a small float16 codebook held in registers, by byte permutation; used by `scalar.py` and `directions.py`.

`prmt` picks any four of eight bytes by four 4-bit selectors: the low bytes of four entries at once, then the high ones.
16 entries take two and a third that chooses between them. Nothing is loaded but the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kvq_kernels.decode_attention.formats.shared import interpreted

if TYPE_CHECKING:
    from kvq_kernels.decode_attention.formats.codebook import CodebookSpec

#: Selectors for the bytes a0 b0 a1 b1, and a2 b2 a3 b3 of a and b.
LOWER = tl.constexpr(0x5140)
UPPER = tl.constexpr(0x7362)


@triton.constexpr_function
def fields(spec: CodebookSpec) -> int:
    """Fields of a word: field f of word w is channel w + words f."""
    return 32 // spec.field_bits


@triton.jit
def byte_permute(a, b, selectors):
    """int32: four of the eight bytes of a (0 ... 3) and b (4 ... 7), chosen by the low four hex digits of `selectors`,
    all of which are below 8."""
    if interpreted():
        pairs = 0 * selectors
        for i in tl.static_range(4):
            selector = (selectors >> (4 * i)) & 7
            pairs |= ((tl.where(selector < 4, a, b) >> (8 * (selector & 3))) & 255) << (8 * i)
        return pairs
    else:
        return libdevice.byte_perm(a, b, selectors)


@triton.jit
def load_table(packed, C: tl.constexpr):
    """(low bytes, high bytes) of the float16 entries, four per int32."""
    S: tl.constexpr = C.S
    COUNT: tl.constexpr = S.entries
    low, high = (), ()
    for first in tl.static_range(0, COUNT, 4):
        low_bytes, high_bytes = 0, 0
        for i in tl.static_range(min(4, COUNT)):
            x = tl.load(packed.centroids + (first + i)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            low_bytes |= (x & 255) << (8 * i)
            high_bytes |= ((x >> 8) & 255) << (8 * i)
        low, high = low + (low_bytes,), high + (high_bytes,)
    return low, high


@triton.jit
def select_bytes(table, code, top, COUNT: tl.constexpr):
    """Bytes of four codes' entries from one half of the table. top: selectors between the two halves of 16 entries."""
    if COUNT <= 4:
        return byte_permute(table[0], table[0], code)
    elif COUNT == 8:
        return byte_permute(table[0], table[1], code)
    else:
        return byte_permute(byte_permute(table[0], table[1], code), byte_permute(table[2], table[3], code), top)


@triton.jit
def lookup_pairs(low, high, table, S: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """int32 pairs of float16 numbers for the hex digits of words `low` (third bits of codes in `high`): for each half
    word, the pairs that selectors FIRST make of low and high bytes, then those of SECOND."""
    BITS: tl.constexpr = S.field_bits
    COUNT: tl.constexpr = S.entries
    MASK: tl.constexpr = 0x11111111 * min(2**BITS - 1, 7)
    pairs = ()
    for half in tl.static_range(2):
        first, second = (), ()
        for i in tl.static_range(4 // BITS):
            code, top = (low >> (BITS * i)) & MASK, low
            if COUNT == 8:
                code |= (high << (2 - 2 * i)) & 0x44444444
            if COUNT == 16:
                top = (((low >> 1) & 0x44444444) | 0x32103210) >> (16 * half)
            code = code >> (16 * half)
            low_bytes, high_bytes = select_bytes(table[0], code, top, COUNT), select_bytes(table[1], code, top, COUNT)
            first = first + (byte_permute(low_bytes, high_bytes, FIRST),)
            second = second + (byte_permute(low_bytes, high_bytes, SECOND),)
        pairs = pairs + first + second
    return pairs


@triton.jit
def unpack_pair(pair):
    """float16 [..., 2]: both numbers of each pair. In assembly, since shifts would take a register per number."""
    if interpreted():
        return tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        twice = tl.join(pair, pair)
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], tl.float16, is_pure=True, pack=2)


@triton.jit
def decode_two_words(a, b, ah, bh, table, S: tl.constexpr, half, HALVES: tl.constexpr):
    """Tuple over fields of float16 [..., 2]: numbers of words a and b, from half word `half` on."""
    pairs = ()
    for i in tl.static_range(HALVES):
        selectors = LOWER + (half + i) * (UPPER - LOWER)
        low, high = byte_permute(a, b, selectors), a
        if S.bits == 3:
            high = byte_permute(ah, bh, selectors)
        pairs = pairs + lookup_pairs(low, high, table, S, 0x6240, 0x7351)
    numbers = ()
    for i in tl.static_range(HALVES * fields(S) // 2):
        numbers = numbers + (unpack_pair(pairs[i]),)
    return numbers


@triton.jit
def decode_one_word(low, high, table, S: tl.constexpr):
    """Tuple over fields of float16: numbers of a word."""
    BITS: tl.constexpr = S.field_bits
    pairs = lookup_pairs(low, high, table, S, LOWER, UPPER)
    numbers = ()
    for quarter in tl.static_range(4):  # the fields of a pair are 4 / BITS apart
        first, second = (), ()
        for i in tl.static_range(4 // BITS):
            x, y = tl.split(unpack_pair(pairs[quarter * (4 // BITS) + i]))
            first, second = first + (x,), second + (y,)
        numbers = numbers + first + second
    return numbers
