"""Inputs of `rematerialize`: cached layer inputs of one layer, the projection to keys or values, and the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Side


@dataclass(frozen=True)
class Norm:
    """Norm of each head's key: (k - mean) / sqrt(mean((k - mean)^2) + epsilon) * weight; kind "rms": mean = 0.

    weight: float32 `[H, D]`.
    """

    kind: Literal["rms", "layer"]
    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Latents:
    """Layer inputs or their latents x, `[B, 1, T, R]`: keys (before RoPE) or values are norm(x W + b).

    held:   a `Side` with one head of R channels, packed as `Uniform` or `Dense`.
    weight: W `[R, H * D]`, any strides: S B^T, or a view of the model's projection. bias: b `[H * D]` or None.
    norm:   of keys, or None.
    first:  `[B, 1, T, 1]`: channel 0 of packed tokens, of which `held.packed` then has the R - 1 others; or None.
    """

    held: Side
    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    first: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.weight.shape[0]


@dataclass
class Workspace:
    """Buffers between the kernels; their size does not depend on the context.

    scores:  float32 `[B, Q, span]`, of `span` tokens at a time.
    partial: float32 `[B, Q, splits, R]`, sum of p x over each split's tokens.
    logsum:  float32 `[2, B, Q, splits]`, their log-sum-exp (base 2); one half is read while the other is written.
    """

    scores: Tensor
    partial: Tensor
    logsum: Tensor

    @classmethod
    def like(cls, query: Tensor, rank: int, span: int, splits: int) -> Workspace:
        """An empty workspace for `query` `[B, Q, D]` over values with R = `rank` channels."""
        rows, heads, _ = query.shape
        sizes = (rows, heads, span), (rows, heads, splits, rank), (2, rows, heads, splits)
        return cls(*(torch.empty(size, dtype=torch.float32, device=query.device) for size in sizes))

    @property
    def span(self) -> int:
        return self.scores.shape[2]

    @property
    def splits(self) -> int:
        return self.logsum.shape[3]
