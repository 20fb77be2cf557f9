"""Steps of uniform codes that lose least, and what is lost with each width."""

from __future__ import annotations

import torch
from kvq_kernels.fields import FIELD, MAX_WIDTH
from torch import Tensor

#: The step of 1 to 8-bit codes that loses least of a normal number of deviation 1 (Max, 1960).
_NORMAL = (1.5957, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
#: Factors of it that are tried.
_FACTORS = (0.5, 0.62, 0.74, 0.86, 1.0, 1.15, 1.35, 1.6)
#: Tokens at a time, whose numbers stay in a core's cache.
_TILE = 1024


def squared_losses(y: Tensor, weights: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(step, loss) of each component with `width`-bit codes: codes are round(y / step + (2^width - 1) / 2), clamped.

    y, weights: `[G, N, K]` float32. step: `[G, K]` float32, the best one tried. loss: the mean over tokens of weight
    times squared error, float64.
    """
    deviation = weighted_deviation(y, weights)
    low = 2.0 ** (width - 1)
    losses = torch.zeros(len(_FACTORS), *deviation.shape, dtype=torch.float64, device=y.device)
    for numbers, masses in zip(y.split(_TILE, dim=1), weights.split(_TILE, dim=1), strict=True):
        for index, factor in enumerate(_FACTORS):
            scaled = numbers / (deviation * (_NORMAL[width - 1] * factor)).unsqueeze(1)
            error = scaled - scaled.floor().clamp_(-low, low - 1).add_(0.5)
            losses[index] += error.square_().mul_(masses).sum(1).double() * factor**2
    least, chosen = losses.min(dim=0)
    step = deviation * _NORMAL[width - 1] * torch.tensor(_FACTORS, device=y.device)[chosen]
    return step, least * (deviation.double() * _NORMAL[width - 1]).square() / y.shape[1]


def weighted_deviation(y: Tensor, weights: Tensor) -> Tensor:
    """Root of the weighted mean square of each component, `[G, K]`, 1 where it is constant.

    At most twice the plain one: where few tokens hold all the weight, others would be coded too coarsely.
    """
    plain = y.square().mean(1)
    mass = weights.mean(1)
    weighted = torch.where(mass > 0, (y.square() * weights).mean(1) / mass.clamp_min(1e-38), plain)
    deviation = torch.minimum(weighted, 4 * plain).sqrt()
    return torch.where(deviation > 0, deviation, 1.0)


def losses_by_width(y: Tensor, weights: Tensor) -> Tensor:
    """The loss of each field with codes of 0 to 8 bits, `[G, fields, 9]` float64 on the CPU."""
    dropped = (y.square() * weights).double().mean(1)
    losses = [dropped, *(squared_losses(y, weights, width)[1] for width in range(1, MAX_WIDTH + 1))]
    every = torch.stack(losses, dim=2)[:, : y.shape[2] // FIELD * FIELD]  # [G, K, 9]
    return every.unflatten(1, (-1, FIELD)).sum(2).cpu()
