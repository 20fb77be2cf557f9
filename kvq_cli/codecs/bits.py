"""Planar bit packing: small integers into 32-bit words along the last dimension.

With `W` words per row, number `c` of the row sits in word `c % W` at bit `bits * (c // W)`. So one shift of all
words gives `W` neighbouring numbers at once (a *plane*), and unpacking is shift and mask without any reordering.
3-bit numbers are a 2-bit part (low bits) followed by a 1-bit part (high bit), each packed like this.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


WORD = 32
#: Names of types by their number of bytes, for `wide`: moving one wide number is faster than moving several small ones.
_WIDE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
#: How the bits of one number are split over separately packed parts, low bits first.
SPLIT = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def wide(nbytes: int) -> torch.dtype:
    """Return a type of 1, 2, 4, 8 or 16 bytes as which numbers are moved together."""
    return getattr(torch, _WIDE[nbytes])


def words_per_row(bits: int, count: int) -> int:
    """32-bit words that hold `count` numbers of `bits` bits (the last word may be padded)."""
    return sum(-(-count * part // WORD) for part in SPLIT[bits])


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes` `[..., count]` (integers in `[0, 2^bits)`, any integer dtype) -> int32 words `[..., words_per_row]`."""
    codes = codes.to(torch.int32)
    if bits != 3:
        return _pack_part(codes, bits)
    return torch.cat([_pack_part(codes & 3, 2), _pack_part(codes >> 2, 1)], dim=-1)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 `words` `[..., words_per_row(bits, count)]` -> the uint8 numbers `[..., count]` that `pack` was given."""
    if bits != 3:
        return _unpack_part(words, bits, count)
    low, high = words.split([words_per_row(2, count), words_per_row(1, count)], dim=-1)
    return _unpack_part(low, 2, count) | (_unpack_part(high, 1, count) << 2)


def _pack_part(codes: Tensor, bits: int) -> Tensor:
    count, per_word = codes.shape[-1], WORD // bits
    words = words_per_row(bits, count)
    planes = torch.nn.functional.pad(codes, (0, words * per_word - count)).unflatten(-1, (per_word, words))
    # The planes' bits are disjoint, so that their sum is their union and cannot overflow.
    return (planes << _shifts(bits, WORD, codes.device).unsqueeze(-1)).sum(dim=-2, dtype=torch.int32)


def _unpack_part(words: Tensor, bits: int, count: int) -> Tensor:
    """Works on whole planes of all rows, which are long runs in memory, and only then puts each row's planes side by
    side, moving neighbouring numbers together. Shifting row by row is several times slower on a CPU."""
    per_word, row = WORD // bits, words.shape[-1]
    octets = (words.reshape(1, -1) >> _shifts(8, WORD, words.device).unsqueeze(-1)).to(torch.uint8)
    planes = (octets.unsqueeze(1) >> _shifts(bits, 8, words.device).unsqueeze(-1)).bitwise_and_(2**bits - 1)
    unit = next(u for u in (16, 8, 4, 2, 1) if row % u == 0)
    planes = planes.view(wide(unit)).view(per_word, -1, row // unit)
    rows = planes.transpose(0, 1).contiguous().view(torch.uint8)
    return rows.view(*words.shape[:-1], per_word * row)[..., :count]


@cache
def _shifts(step: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(0, end, step, dtype=torch.int32 if end == WORD else torch.uint8, device=device)
