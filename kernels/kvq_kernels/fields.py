"""Where the codes of a transform's components are in memory. Pure Python: storage and kernels share it.

A *field* is 8 components with codes of the same width, 1 to 8 bits; a profile is the widths of all fields, descending.
8 lanes (values) or 4 lanes (keys, with 2 components each) hold a token's codes, R bytes a lane: the profile's *rate*.
These bytes are cut into pieces of 16, 8, 4, 2 and 1 bytes, by the binary digits of R, so that a lane reads each piece
at once. Pieces are divided into words of 32 bits, the pieces of 2 and 1 bytes into one of 16 or 8 bits, and words into
two halves, the *rooms*. A field is in one room, at the same bits of both halves:

    keys    [B, G, T, 4 lanes, words]                       lane j, half h, field f: component 8 f + 2 j + h
    values  [B, G, T / 16, 8 pairs of tokens, 8 lanes, words]  lane g, half h, field f: component 8 f + g of token
                                                               2 pair + h

Rooms are filled in order, large ones first: each field is in the first room with enough bits left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

#: Components of a field.
FIELD = 8
#: Bits of the widest code.
MAX_WIDTH = 8
#: Bytes of a piece, largest first.
PIECES = (16, 8, 4, 2, 1)
#: Bits of a float16's fraction: codes within them are read as subnormal numbers.
FRACTION = 10
#: Tokens of a block of values; as many are packed at a time.
BLOCK = 16
KEY_LANES, VALUE_LANES = 4, 8


class Part(NamedTuple):
    """All pieces of one size: one tensor, `codes{size}`. words: of a lane, `bits` each."""

    size: int
    words: int
    bits: int

    @property
    def name(self) -> str:
        return f"codes{self.size}"

    @property
    def room(self) -> int:
        """Bits of half a word."""
        return self.bits // 2


class Place(NamedTuple):
    """Where a field is: in words number `word` of `parts(...)[part]`, from bit `shift + offset` of either half on.

    (half >> shift) & (mask << offset) is the bits of the float16 number code * 2^(offset - 24): offset + width <= 10.
    """

    part: int
    word: int
    shift: int
    offset: int


def rate(widths: Sequence[int]) -> int:
    """Bytes of a lane, R: the least that hold the codes."""
    return max(1, -(-sum(widths) // 4))


def parts(lane_bytes: int) -> tuple[Part, ...]:
    """The parts of R bytes, largest pieces first. ValueError for less than one byte."""
    if lane_bytes < 1:
        raise ValueError(f"a lane has at least one byte, not {lane_bytes}")
    found = []
    for size in PIECES:
        pieces = lane_bytes // 16 if size == 16 else int(bool(lane_bytes & size))
        if pieces:
            found.append(Part(size, pieces * max(1, size // 4), min(32, 8 * size)))
    return tuple(found)


def fits(widths: Sequence[int]) -> bool:
    """Whether a profile can be stored at its rate: it has valid widths, and each field finds a room."""
    try:
        places(tuple(widths))
    except ValueError:
        return False
    return True


@cache
def places(widths: tuple[int, ...]) -> tuple[Place, ...]:
    """Place of each field. ValueError for a profile that is not valid or does not fit its rate."""
    if any(not 1 <= width <= MAX_WIDTH for width in widths) or list(widths) != sorted(widths, reverse=True):
        raise ValueError(f"widths must be 1 to {MAX_WIDTH} bits, descending, not {list(widths)}")
    rooms = [
        (part, word, divided.room) for part, divided in enumerate(parts(rate(widths))) for word in range(divided.words)
    ]
    used, shifts, found = [0] * len(rooms), [0] * len(rooms), []
    for width in widths:
        index = next((i for i, (_, _, size) in enumerate(rooms) if used[i] + width <= size), None)
        if index is None:
            raise ValueError(f"fields of {list(widths)} bits do not fit lanes of {rate(widths)} bytes")
        if used[index] - shifts[index] + width > FRACTION:
            shifts[index] = used[index]  # the next fields share this shift as long as they fit
        found.append(Place(*rooms[index][:2], shifts[index], used[index] - shifts[index]))
        used[index] += width
    return tuple(found)
