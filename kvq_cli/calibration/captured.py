"""Captured keys or values of one layer, and how they are clustered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.calibration.kmeans import Engine


@dataclass(frozen=True)
class CapturedStream:
    """Captured keys or values of one layer, `[samples, tokens, kv_heads, head_dim]` bfloat16.

    x:        activations of all samples, those with gradients first.
    g:        gradients of the first `len(g)` samples.
    held_out: how many of these, the last ones, are held out.
    """

    x: Tensor
    g: Tensor
    held_out: int

    @property
    def training(self) -> int:
        """Samples with gradients that are not held out, the first ones."""
        return len(self.g) - self.held_out

    @property
    def not_held_out(self) -> Tensor:
        """The activations that statistics are computed from: those of all samples but the held-out ones."""
        return torch.cat([self.x[: self.training], self.x[len(self.g) :]])

    def to(self, device: torch.device) -> CapturedStream:
        return CapturedStream(self.x.to(device), self.g.to(device), self.held_out)


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of the clustering.

    fisher, hybrid: as in `CalibrationSpec`. points, iterations, damping: as in `CalibrationOptions`.
    dtype: dtype of the stored centroids. engine: see `kmeans.choose_engine`.
    """

    fisher: bool
    hybrid: str
    points: int
    iterations: int
    seed: int
    dtype: torch.dtype
    damping: float = 0.0
    engine: Engine = "auto"
