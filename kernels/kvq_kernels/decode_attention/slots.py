"""Outliers of a tile, `PIECE` at once: one per thread, else all threads would compute all of them.

Lists are of a block of tokens of a head, all of them its own, or of a token of all heads: of those, most are others'
and a head's own are found first, as bits of `WORDS` words, one per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kvq_kernels.decode_attention.number import number
from kvq_kernels.decode_attention.permute import interpreted
from kvq_kernels.decode_attention.spec import get

PIECE = tl.constexpr(32)
WORDS = tl.constexpr(32)


@triton.constexpr_function
def rounds(spec, tokens):
    """In how many parts the lists of a tile of so many tokens are read: a word has bits for 32 slots."""
    return -(-tokens * spec.slots // (32 * WORDS.value)) if spec.across else 1


@triton.jit
def _listed(word, bit):
    """The slot that a bit stands for. Backwards: a run of slots would be given to one thread."""
    return bit * WORDS + (WORDS - 1 - word)


@triton.jit
def _count_bits(x, S: tl.constexpr):
    """Of uint32 words."""
    if get(S, "nvidia") and not interpreted():
        return libdevice.popc(x.to(tl.int32, bitcast=True))
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def own_slots(side, S: tl.constexpr, begin, first, N: tl.constexpr):
    """(words, through, count) of a tile of N tokens that starts at packed token `begin`: uint32 [WORDS], of which bit b
    of word w is set if slot `_listed(w, first + b)` is of this head; how many bits are set up to each word; in all."""
    COUNT: tl.constexpr = N // get(S, "block") * get(S, "slots")
    D: tl.constexpr = get(S, "dim")
    if not get(S, "across"):
        return 0, 0, COUNT
    else:
        EACH: tl.constexpr = (COUNT + WORDS - 1) // WORDS
        bit = tl.arange(0, min(32, triton.next_power_of_2(EACH)))[:, None]
        slot = _listed(tl.arange(0, WORDS)[None, :], first + bit)
        seen = first + bit < EACH
        if EACH * WORDS != COUNT:
            seen &= slot < COUNT
        lists = side[9] + begin * get(S, "slots") + _listed(tl.arange(0, WORDS)[None, :], first)
        listed = tl.max_contiguous(lists + bit * WORDS, [1, 2])  # see `order.py`
        index = tl.load(listed, mask=seen, other=-1).to(tl.uint16, bitcast=True).to(tl.uint32)
        head = side[11].to(tl.uint32)
        own = (index ^ head if D & (D - 1) == 0 else index - head) < D
        words = tl.sum(tl.where(own & seen, 1 << bit, 0), axis=0).to(tl.uint32, bitcast=True)
        through = tl.cumsum(_count_bits(words, S), 0)
        return words, through, tl.max(through, axis=0)


@triton.jit
def piece(own, S: tl.constexpr, first, at):
    """(slots [PIECE] of this head's outliers from the `at`-th on, which of them there are); others are any slots.
    own: see `own_slots`."""
    words, through, count = own
    wanted = at + tl.arange(0, PIECE)
    if not get(S, "across"):
        return tl.minimum(wanted, count - 1), wanted < count
    else:
        before = 0 * wanted - 1  # words of which the last has no more than is wanted
        for i in tl.static_range(5):
            further = before + (16 >> i)
            before = tl.where(tl.gather(through, further, 0) <= wanted, further, before)
        word = before + 1
        left = tl.gather(words, word, 0)
        rank = wanted - tl.gather(through, word, 0) + _count_bits(left, S)
        above = 0 * wanted + 32  # bits, of which those below the lowest are no more than the rank
        for i in tl.static_range(5):
            fewer = above - (16 >> i)
            above = tl.where(_count_bits(left << fewer.to(tl.uint32), S) <= rank, fewer, above)
        bit = 32 - above
        return tl.where(wanted < count, _listed(word, first + bit), 0), wanted < count


@triton.jit
def place(side, S: tl.constexpr, begin, slot):
    """(token within the tile, channel) of the tile's outliers `slot`."""
    D: tl.constexpr = get(S, "dim")
    SLOTS: tl.constexpr = get(S, "slots")
    BLOCK: tl.constexpr = get(S, "block")
    lists = side[9] + begin // BLOCK * SLOTS
    index = tl.load(lists + slot).to(tl.uint16, bitcast=True).to(tl.uint32)
    token = slot.to(tl.uint32) // SLOTS * BLOCK  # unsigned: no signs to take care of
    if get(S, "across"):  # a condition that is loaded, else the compiler finds slots again wherever tokens are needed
        token = tl.where(index // D == side[11].to(tl.uint32) // D, token, 0)
    else:
        token += index // D
    return token.to(tl.int32), (index % D).to(tl.int32)


@triton.jit
def changes(side, S: tl.constexpr, begin, slot, real):
    """(token within the tile, channel, value less what the codes say) of the tile's outliers `slot` [PIECE]; 0 for
    those that are not `real`."""
    token, channel = place(side, S, begin, slot)
    value = tl.load(side[10] + begin // get(S, "block") * get(S, "slots") + slot).to(tl.float32)
    every = tl.full([PIECE], True, tl.int1)
    return token, channel, tl.where(real, value - number(side, S, (begin + token).to(tl.uint32), channel, every), 0.0)
