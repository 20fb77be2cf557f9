"""X^T X of the tokens of long prompts, in float64, without a copy of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_cli.codecs.base import TILE
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def token_tiles(x: Tensor) -> tuple[Tensor, ...]:
    """`x` `[..., T, D]` in runs of tokens of at most about `TILE` numbers."""
    return x.split(max(1, TILE * x.shape[-2] // max(1, x.numel())), dim=-2)


def gram_matrix(x: Tensor) -> Tensor:
    """X^T X of `x` `[..., T, D]`: float64 `[..., D, D]`."""
    total: Tensor | None = None
    for tile in token_tiles(x):
        wide = tile.to(torch.float64)
        square = wide.mT @ wide
        total = square if total is None else total.add_(square)
    assert total is not None  # a split has one tile at least
    return total
