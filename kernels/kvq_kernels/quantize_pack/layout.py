"""How numbers are to be packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

#: Bits of a code's separately packed parts, low bits first, as `Uniform` has them.
SPLIT = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
#: Integers of so many bytes, in which scales and zero-points are written.
BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """bits: 1, 2, 3, 4 or 8. axis, group: as of `Uniform`. dim: D.

    mode: "asymmetric", "symmetric", "hybrid". sign: where symmetric groups have theirs: "extra", a word of `group` bits
    (16, 32 or 64) per group, in a hybrid the zero-point of asymmetric groups; or "inside" the codes.
    scale_dtype: float16 or bfloat16. zero_dtype: of zero-points; with sign bits in words of `group` bits, as wide as
    these.
    """

    bits: int
    axis: Literal["channel", "token"]
    group: int
    dim: int
    mode: Literal["asymmetric", "symmetric", "hybrid"] = "asymmetric"
    sign: Literal["extra", "inside"] = "extra"
    scale_dtype: torch.dtype = torch.float16
    zero_dtype: torch.dtype = torch.float16

    @property
    def block_tokens(self) -> int:
        return self.group if self.axis == "channel" else 1

    @property
    def words(self) -> tuple[int, ...]:
        """32-bit words of a token, of each part of its codes."""
        return tuple(-(-self.dim * part // 32) for part in SPLIT[self.bits])

    @property
    def largest(self) -> int:
        """The largest magnitude of a symmetric code."""
        return 2**self.bits - 1 if self.sign == "extra" else 2 ** (self.bits - 1) - 1

    @property
    def has_words(self) -> bool:
        """Whether groups have a word of signs."""
        return self.mode != "asymmetric" and self.sign == "extra"

    @property
    def has_zero(self) -> bool:
        """Whether zero-points are a tensor of their own."""
        return self.mode == "asymmetric" or (self.mode == "hybrid" and self.sign == "inside")

    @property
    def level(self) -> int:
        return self.largest if self.mode != "asymmetric" and self.sign == "inside" else 0

    def sides(self, rows: int, heads: int, tokens: int) -> tuple[int, ...]:
        """The shape of scales."""
        if self.axis == "channel":
            return rows, heads, tokens // self.group, self.dim
        return rows, heads, tokens, self.dim // self.group
