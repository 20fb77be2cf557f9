"""Sums in a fixed order of additions: a sum of PyTorch's may round differently for other shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def ordered_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Return the sum of `x` over dimension `dim`, which is kept with length 1; the same for a token alone and among
    others."""
    while (length := x.shape[dim]) > 1:
        half = length // 2
        paired = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([paired, x.narrow(dim, length - 1, 1)], dim=dim) if length % 2 else paired
    return x
