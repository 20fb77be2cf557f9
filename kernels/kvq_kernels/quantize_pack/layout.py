"""Storage format of quantized groups (`Layout`): bits, grouping, mode, types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

#: Bits of the parts of a code that are packed separately, low bits first (see `Uniform.codes`).
SPLIT = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
#: Integer types by their bytes: scales and zero-points are stored as integers.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """Storage format of quantized groups. axis, group: as in `Uniform`. dim: D.

    bits: 1, 2, 3, 4 or 8.
    mode: "asymmetric", "symmetric", "hybrid" (either per group).
    sign: of symmetric groups. "extra": a word of `group` (16, 32 or 64) sign bits per group, in a hybrid the zero-point
          of asymmetric groups. "inside": codes are signed; not in a hybrid (ValueError).
    scale_dtype: float16 or bfloat16. zero_dtype: of zero-points; in words of sign bits, as wide as these.
    """

    bits: int
    axis: Literal["channel", "token"]
    group: int
    dim: int
    mode: Literal["asymmetric", "symmetric", "hybrid"] = "asymmetric"
    sign: Literal["extra", "inside"] = "extra"
    scale_dtype: torch.dtype = torch.float16
    zero_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.mode == "hybrid" and self.sign == "inside":
            raise ValueError("a hybrid keeps zero-points in the words of sign bits: sign is extra")

    @property
    def block_tokens(self) -> int:
        """Tokens that are quantized together."""
        return self.group if self.axis == "channel" else 1

    @property
    def words(self) -> tuple[int, ...]:
        """32-bit words of a token, for each part of its codes."""
        return tuple(-(-self.dim * part // 32) for part in SPLIT[self.bits])

    @property
    def largest(self) -> int:
        """Largest magnitude of a symmetric code."""
        return 2**self.bits - 1 if self.sign == "extra" else 2 ** (self.bits - 1) - 1

    @property
    def has_words(self) -> bool:
        """Whether groups have a word of sign bits."""
        return self.mode != "asymmetric" and self.sign == "extra"

    @property
    def has_zero(self) -> bool:
        """Whether zero-points are in a separate tensor."""
        return self.mode == "asymmetric"

    @property
    def level(self) -> int:
        """The code of 0 in symmetric groups."""
        return self.largest if self.mode != "asymmetric" and self.sign == "inside" else 0

    def scale_shape(self, rows: int, heads: int, tokens: int) -> tuple[int, ...]:
        """Shape of scales, zero-points and words of signs."""
        if self.axis == "channel":
            return rows, heads, tokens // self.group, self.dim
        return rows, heads, tokens, self.dim // self.group
