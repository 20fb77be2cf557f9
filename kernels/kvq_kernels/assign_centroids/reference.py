"""The steps of k-means in plain PyTorch. Tests compare the kernels with them."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_centroids_reference(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8, scores in the type of the points) `[codebooks, points]`; see `assign_centroids`."""
    half_norms = centroids.square().sum(dim=2) / 2
    scores, codes = torch.baddbmm(half_norms[:, None], points, centroids.mT, alpha=-1).min(dim=2)
    return codes.to(torch.uint8), scores


def sums_by_code_reference(numbers: Tensor, codes: Tensor, entries: int) -> Tensor:
    """float64 `[codebooks, entries, columns]`; see `sums_by_code`."""
    members = torch.nn.functional.one_hot(codes.long(), entries).double()  # [codebooks, points, entries]
    return members.mT @ numbers.double()
