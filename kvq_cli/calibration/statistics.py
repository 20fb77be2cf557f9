"""Per-channel statistics of a stream: mean, standard deviation, outlier thresholds, correlation of adjacent tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mean_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) standard deviation over all tokens, each `[kv_heads, head_dim]` float32.

    x: `[samples, tokens, kv_heads, head_dim]`. Computed sample by sample around the first one's mean.
    """
    center = x[0].float().mean(0)
    total, squares = torch.zeros_like(center, dtype=torch.float64), torch.zeros_like(center, dtype=torch.float64)
    for sample in x:
        shifted = sample.float() - center
        total += shifted.sum(0)
        squares += shifted.square_().sum(0)
    count = x.shape[0] * x.shape[1]
    variance = (squares - total.square() / count) / count
    return (center + total / count).float(), variance.clamp_min(0).sqrt().float()


def outlier_thresholds(x: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """The quantiles outliers / 2 and 1 - outliers / 2 of each channel, each `[kv_heads, head_dim]` float32.

    0.01 gives the 0.005 and 0.995 quantiles. x: `[samples, tokens, kv_heads, head_dim]`.
    """
    channels = x.flatten(0, 1).float().flatten(1).T.contiguous().cpu().numpy()
    low, high = np.quantile(channels, [outliers / 2, 1 - outliers / 2], axis=1)
    return tuple(torch.from_numpy(q).to(x.device, torch.float32).view(x.shape[2:]) for q in (low, high))


def adjacent_correlation(x: Tensor, mean: Tensor, std: Tensor) -> float:
    """Correlation of adjacent tokens, averaged over channels; pairs (0, 1), (2, 3), ... of each sample.

    x: `[samples, tokens, kv_heads, head_dim]`, tokens even; constant channels are left out.
    """
    products = torch.zeros_like(mean)
    for sample in x:
        centred = sample.float() - mean
        products += (centred[0::2] * centred[1::2]).mean(0)
    alive = std > 0
    return (products / len(x) / std.square().clamp_min(1e-30))[alive].mean().item() if alive.any() else 0.0
