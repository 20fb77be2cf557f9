"""Constants of a profile that encode its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvq_kernels import fields

_WORDS = {32: torch.int32, 16: torch.int16, 8: torch.uint8}


class GainTables(NamedTuple):
    """How a token's gain is found: n is the number of `limits` up to the greater of sum(z^2) / total and
    max(z_k^2, k < `first`) / largest, where z = round(u scale), clamped to +-limit.

    scale: float32 `[G, K]`. limits: float64 `[255]`, ascending. gains: float32 `[256]`, g of n.
    """

    scale: Tensor
    limits: Tensor
    gains: Tensor
    limit: float
    total: float
    largest: float
    first: int


class PackTables(NamedTuple):
    """Contiguous tensors. With G groups of W channels and K components, in fields of 8:

    mean, to_grid: float32 `[G, W]`; the grid of x is round((x - mean) to_grid), clamped to +-limit.
    integers:      A, whole numbers, float32 or float64 `[G, W, K]`. step: float64 `[G, K]`, powers of two.
                   u = step A x.
    center:        float32 `[G, K]`.
    largest, word: `[K / 8]` of each field, its largest code, int16, and its word among those of all parts, int32.
    shift, high:   `[K / 8]`, the first bit of its codes in the lower half of a word, int16, and in the upper, int32.
    values:        the form of values, else that of keys. rate: bytes of a lane.
    """

    mean: Tensor
    to_grid: Tensor
    integers: Tensor
    step: Tensor
    center: Tensor
    largest: Tensor
    word: Tensor
    shift: Tensor
    high: Tensor
    limit: float
    values: bool
    rate: int
    gain: GainTables | None

    @property
    def parts(self) -> tuple[fields.Part, ...]:
        return fields.parts(self.rate)

    def outputs(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Empty codes and gains of `x` `[B, G, T, W]`."""
        rows, groups, tokens, _ = x.shape
        lanes = (tokens // fields.BLOCK, fields.BLOCK // 2, fields.VALUE_LANES)
        shape = (rows, groups, *(lanes if self.values else (tokens, fields.KEY_LANES)))
        codes = tuple(x.new_empty(*shape, part.words, dtype=_WORDS[part.bits]) for part in self.parts)
        return codes, None if self.gain is None else x.new_empty(rows, groups, tokens, dtype=torch.uint8)
