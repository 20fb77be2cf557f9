"""Per-channel statistics of a stream: mean, standard deviation, outlier thresholds, correlation of adjacent tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mean_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) standard deviation over all tokens, each `[kv_heads, head_dim]` float32.

    x: `[samples, tokens, kv_heads, head_dim]`. Summed sample by sample, around the first sample's mean.
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
    """Lower and upper outlier thresholds of each channel, `[kv_heads, head_dim]` float32 each.

    These are the quantiles outliers / 2 and 1 - outliers / 2: 0.005 and 0.995 for outliers=0.01.
    x: `[samples, tokens, kv_heads, head_dim]`.
    """
    channels = x.flatten(0, 1).float().flatten(1).T.contiguous().cpu().numpy()
    low, high = np.quantile(channels, [outliers / 2, 1 - outliers / 2], axis=1)
    lower, upper = (torch.from_numpy(q).to(x.device, torch.float32).view(x.shape[2:]) for q in (low, high))
    return lower, upper


def adjacent_correlation(x: Tensor, mean: Tensor, std: Tensor) -> float:
    """Correlation of the token pairs (0, 1), (2, 3), ... of each sample, averaged over channels that are not constant.

    x: `[samples, tokens, kv_heads, head_dim]`, an even number of tokens; mean, std: `[kv_heads, head_dim]`.
    """
    products = torch.zeros_like(mean)
    for sample in x:
        centered = sample.float() - mean
        products += (centered[0::2] * centered[1::2]).mean(0)
    varying = std > 0
    return (products / len(x) / std.square().clamp_min(1e-30))[varying].mean().item() if varying.any() else 0.0
