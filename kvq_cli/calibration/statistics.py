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
    x: `[samples, tokens, kv_heads, head_dim]`. Takes a float32 copy of one head at a time.
    """
    levels = [outliers / 2, 1 - outliers / 2]
    lower, upper = x.new_empty(2, *x.shape[2:], dtype=torch.float32)
    for head in range(x.shape[2]):
        channels = x[:, :, head].flatten(0, 1).float().T.contiguous().cpu().numpy()
        low, high = np.quantile(channels, levels, axis=1, overwrite_input=True)
        lower[head], upper[head] = torch.from_numpy(low), torch.from_numpy(high)
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
