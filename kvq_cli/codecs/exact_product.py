"""Products with a matrix that are the same for a token alone and among others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


#: Numbers are clamped to this many deviations (a power of two).
_MAX_DEVIATIONS = 2.0**7
#: Bits of the integers that float32 holds exactly.
_FLOAT_BITS = 24


class ExactProduct:
    """z = A x. Numbers and A are rounded to integers whose products and sums are below 2^53, so that nothing else is
    rounded, in whatever order it is added. Numbers beyond 128 deviations are clamped.

    std: `[G, W]`, deviation of each number, 0 where it is always 0. matrix: A, `[G, K, W]`.
    """

    def __init__(self, std: Tensor, matrix: Tensor) -> None:
        bits = grid_bits(std.shape[1])
        safe = std.masked_fill(std <= 0, 1)
        self.limit = 2.0**bits
        #: Of each number, what it is multiplied by before it is rounded: float32 `[G, 1, W]`.
        self.to_grid = ((2.0**bits / _MAX_DEVIATIONS) / safe).unsqueeze(1)
        scaled = matrix.double() * safe.double().unsqueeze(1)
        exponent = torch.frexp(scaled.abs().amax(dim=2)).exponent  # the largest of a row is below 2^exponent
        one = torch.ones_like(scaled[:, :, 0])
        integers = (scaled * torch.ldexp(one, bits - exponent).unsqueeze(2)).round()
        #: A^T in integers, `[G, W, K]` float32, which holds those of 24 bits exactly, or float64.
        self.integers = (integers.float() if bits <= _FLOAT_BITS else integers).mT.contiguous()
        #: What sums of integers are multiplied by: powers of two, float64 `[G, K]`.
        self.step = torch.ldexp(one, exponent - bits) * (_MAX_DEVIATIONS / 2.0**bits)

    def tables(self) -> Mapping[str, Tensor]:
        """Tensors held beside `integers`."""
        return {"gain": self.to_grid, "scale": self.step}

    def __call__(self, x: Tensor) -> Tensor:
        """`[B, G, T, W]` -> `[B, G, T, K]`, float32."""
        grid = (x * self.to_grid).round_().clamp_(-self.limit, self.limit).double()
        return (grid @ self.integers.double()).mul_(self.step.unsqueeze(1)).float()


def product_layout(std: tuple[int, ...], matrix: tuple[int, ...]) -> tuple[TensorSpec, dict[str, TensorSpec]]:
    """Shapes and dtypes of `ExactProduct.integers`, and of its `tables`, for arguments of these shapes."""
    groups, width = std
    integers = TensorSpec((groups, width, matrix[1]), "float32" if grid_bits(width) <= _FLOAT_BITS else "float64")
    return integers, {"gain": TensorSpec((groups, 1, width), "float32"), "scale": TensorSpec(matrix[:2], "float64")}


def grid_bits(width: int) -> int:
    """Bits of the integers whose products, summed over `width` numbers, stay below 2^53."""
    return (53 - math.ceil(math.log2(max(2, width)))) // 2
