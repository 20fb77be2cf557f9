"""Outliers of a tile, `PIECE` at once: one per thread, else all threads would compute all of them.

Of each of the tile's blocks a head has a run of slots; runs are read as if they followed each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.dequantize import number
from kvq_kernels.decode_attention.spec import get

PIECE = tl.constexpr(32)


@triton.jit
def slot_runs(side, S: tl.constexpr, begin, N: tl.constexpr):
    """Of each block of the tile of N tokens that starts at packed token `begin`: (how many slots of this head lie in
    it and in those before; what is added to a slot's number among all of them to find it in the tile's lists)."""
    BLOCKS: tl.constexpr = N // get(S, "block")
    SLOTS: tl.constexpr = get(S, "slots")
    runs = ()
    if get(S, "together") == 0:
        for i in tl.static_range(BLOCKS):
            runs = runs + (((i + 1) * SLOTS, 0),)
    else:
        WIDE: tl.constexpr = get(S, "together") + 1
        start = side[11] + begin // get(S, "block") * WIDE
        through = 0
        for i in tl.static_range(BLOCKS):
            first, last = tl.load(start + i * WIDE), tl.load(start + i * WIDE + 1)
            further = i * SLOTS + first - through
            through += last - first
            runs = runs + ((through, further),)
    return runs


@triton.jit
def piece(runs, S: tl.constexpr, at):
    """(slots [PIECE] in the tile's lists from the `at`-th of `slot_runs` on, the first tokens of their blocks, which of
    them there are); others are any slots of the head."""
    BLOCK: tl.constexpr = get(S, "block")
    count = runs[len(runs) - 1][0]
    every = at + tl.arange(0, PIECE)
    wanted = tl.minimum(every, count - 1)
    further, token = runs[0][1] + 0 * wanted, 0 * wanted
    for i in tl.static_range(1, len(runs)):
        later = wanted >= runs[i - 1][0]
        further, token = tl.where(later, runs[i][1], further), tl.where(later, i * BLOCK, token)
    return wanted + further, token, every < count


@triton.jit
def changes(side, S: tl.constexpr, begin, found):
    """(token within the tile, channel, value less what the codes say) of what `piece` found; 0 for those that there are
    not."""
    D: tl.constexpr = get(S, "dim")
    slot, first, real = found
    lists = begin // get(S, "block") * get(S, "slots")
    index = tl.load(side[9] + lists + slot).to(tl.uint16, bitcast=True).to(tl.uint32)
    token, channel = (first.to(tl.uint32) + index // D).to(tl.int32), (index % D).to(tl.int32)
    value = tl.load(side[10] + lists + slot).to(tl.float32)
    every = tl.full([PIECE], True, tl.int1)
    return token, channel, tl.where(real, value - number(side, S, (begin + token).to(tl.uint32), channel, every), 0.0)
