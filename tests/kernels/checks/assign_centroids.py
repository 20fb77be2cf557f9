"""Random points, and whether the steps of k-means by the kernels are as good as PyTorch's against float64."""

from __future__ import annotations

import torch
from kvq_kernels.assign_centroids import assign_centroids, sums_by_code
from kvq_kernels.assign_centroids.reference import assign_centroids_reference


def normal(*shape: int) -> torch.Tensor:
    """Others for another shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(n * 1000**i for i, n in enumerate(shape))))


def squared(points, centroids) -> torch.Tensor:
    """Distances in float64, `[codebooks, points, entries]`."""
    return (points.double()[:, :, None] - centroids.double()[:, None]).square().sum(-1)


def lost(points, centroids, codes) -> torch.Tensor:
    """By how much the chosen centroids are farther away than the nearest ones."""
    distances = squared(points, centroids)
    return distances.gather(2, codes.long()[..., None])[..., 0] - distances.amin(2)


def check(points, centroids) -> None:
    codes, scores = assign_centroids(points, centroids, backend="triton")
    theirs, _ = assign_centroids_reference(points, centroids)
    size = points.square().sum(-1).amax(1) + centroids.square().sum(-1).amax(1)  # of distances
    unit = size.double()[:, None] * torch.finfo(torch.float32).eps
    assert codes.dtype == torch.uint8 and codes.shape == points.shape[:2]
    assert (lost(points, centroids, codes) <= 2 * torch.maximum(lost(points, centroids, theirs), unit)).all()
    distances = points.double().square().sum(-1) + 2 * scores.double()
    exact = squared(points, centroids).amin(2)
    assert ((distances - exact).abs() <= 8 * unit).all()


def check_sums(columns: int, count: int, entries: int) -> None:
    numbers = normal(2, count, columns) * torch.logspace(-30, 10, columns)
    codes = (normal(2, count).abs() * 1000).long() % entries
    place = codes[..., None].expand(-1, -1, columns)
    zeros = torch.zeros(2, entries, columns, dtype=torch.float64)
    exact, mass = (zeros.scatter_add(1, place, x.double()) for x in (numbers, numbers.abs()))
    found = sums_by_code(numbers, codes, entries, backend="triton")
    in_torch = zeros.float().scatter_add(1, place, numbers)
    floor = mass * torch.finfo(torch.float32).eps
    assert ((found - exact).abs() <= 2 * torch.maximum((in_torch - exact).abs(), floor)).all()
    assert torch.equal(found, sums_by_code(numbers, codes, entries, backend="triton"))
    assert torch.allclose(sums_by_code(numbers, codes, entries, backend="torch"), exact, rtol=1e-12, atol=0)
