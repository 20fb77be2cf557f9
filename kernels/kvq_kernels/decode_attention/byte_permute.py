"""Entries of a small codebook picked out of registers, where it lies as float16.

A byte permutation picks any four bytes out of eight, by four digits of 4 bits: the low bytes of four entries at once,
then the high ones. Of 16 entries it takes two, and a third to choose between them. Nothing is loaded but the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from kvq_kernels.decode_attention.spec import get

#: Byte permutations of a, b: the bytes a0 b0 a1 b1, and a2 b2 a3 b3.
LOWER = tl.constexpr(0x5140)
UPPER = tl.constexpr(0x7362)


@triton.constexpr_function
def fields(spec):
    """Fields of a word: field f of word w is channel w + words f."""
    return 32 // spec.field_bits


@triton.constexpr_function
def interpreted():
    return knobs.runtime.interpret


@triton.jit
def permuted(a, b, places):
    """Four of the eight bytes of a (0 ... 3) and b (4 ... 7), int32: those that the low four digits of `places` say, of
    which none is above 7."""
    if interpreted():
        found = 0 * places
        for i in tl.static_range(4):
            place = (places >> (4 * i)) & 7
            found |= ((tl.where(place < 4, a, b) >> (8 * (place & 3))) & 255) << (8 * i)
        return found
    else:
        return libdevice.byte_perm(a, b, places)


@triton.jit
def load_table(side, S: tl.constexpr):
    """The entries as float16: their low bytes, then their high ones, four to a number."""
    COUNT: tl.constexpr = get(S, "entries")
    low, high = (), ()
    for first in tl.static_range(0, COUNT, 4):
        low_bytes, high_bytes = 0, 0
        for i in tl.static_range(min(4, COUNT)):
            x = tl.load(side[1] + (first + i)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            low_bytes |= (x & 255) << (8 * i)
            high_bytes |= ((x >> 8) & 255) << (8 * i)
        low, high = low + (low_bytes,), high + (high_bytes,)
    return low, high


@triton.jit
def picked(table, code, top, COUNT: tl.constexpr):
    """Bytes of half a table at four codes. top: of 16 entries, which half of them each code means."""
    if COUNT <= 4:
        return permuted(table[0], table[0], code)
    elif COUNT == 8:
        return permuted(table[0], table[1], code)
    else:
        return permuted(permuted(table[0], table[1], code), permuted(table[2], table[3], code), top)


@triton.jit
def looked_up(low, high, table, S: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Pairs of float16 numbers, int32, of the digits of words `low` (and their codes' third bits `high`): of each half
    word those pairs of its four digits that permutation FIRST makes of low and high bytes, then those of SECOND."""
    BITS: tl.constexpr = get(S, "field_bits")
    COUNT: tl.constexpr = get(S, "entries")
    MASK: tl.constexpr = 0x11111111 * min(2**BITS - 1, 7)
    found = ()
    for half in tl.static_range(2):
        first, second = (), ()
        for i in tl.static_range(4 // BITS):
            code, top = (low >> (BITS * i)) & MASK, low
            if COUNT == 8:
                code |= (high << (2 - 2 * i)) & 0x44444444
            if COUNT == 16:
                top = (((low >> 1) & 0x44444444) | 0x32103210) >> (16 * half)
            code = code >> (16 * half)
            low_bytes, high_bytes = picked(table[0], code, top, COUNT), picked(table[1], code, top, COUNT)
            first = first + (permuted(low_bytes, high_bytes, FIRST),)
            second = second + (permuted(low_bytes, high_bytes, SECOND),)
        found = found + first + second
    return found


@triton.jit
def both(pair):
    """float16 [..., 2]: the two numbers of each pair. Written in assembly because what the compiler makes of shifts are
    numbers in registers of their own."""
    if interpreted():
        return tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        twice = tl.join(pair, pair)
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], tl.float16, is_pure=True, pack=2)


@triton.jit
def two_words(a, b, ah, bh, table, S: tl.constexpr, half, HALVES: tl.constexpr):
    """float16 [..., 2]: the numbers of words a and b in each of their fields, from half word `half` on."""
    found = ()
    for i in tl.static_range(HALVES):
        places = LOWER + (half + i) * (UPPER - LOWER)
        low, high = permuted(a, b, places), a
        if get(S, "bits") == 3:
            high = permuted(ah, bh, places)
        found = found + looked_up(low, high, table, S, 0x6240, 0x7351)
    numbers = ()
    for i in tl.static_range(HALVES * fields(S) // 2):
        numbers = numbers + (both(found[i]),)
    return numbers


@triton.jit
def one_word(low, high, table, S: tl.constexpr):
    """float16: the numbers of a word in each of its fields."""
    BITS: tl.constexpr = get(S, "field_bits")
    found = looked_up(low, high, table, S, LOWER, UPPER)
    numbers = ()
    for part in tl.static_range(4):  # pairs are made of fields that are 4 / BITS apart
        first, second = (), ()
        for i in tl.static_range(4 // BITS):
            x, y = tl.split(both(found[part * (4 // BITS) + i]))
            first, second = first + (x,), second + (y,)
        numbers = numbers + first + second
    return numbers
