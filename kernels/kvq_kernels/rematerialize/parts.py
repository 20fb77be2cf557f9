"""Inputs of `rematerialize`: cached layer inputs of one layer, and the projection to keys or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
