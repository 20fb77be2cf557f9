"""Random points, and checks that the k-means kernels are as good as PyTorch's against float64."""

from __future__ import annotations

import torch
from kvq_kernels.assign_centroids import assign_centroids, sums_by_code
from kvq_kernels.assign_centroids.reference import assign_centroids_reference


def normal(*shape: int) -> torch.Tensor:
    """Normal random numbers, seeded by the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(n * 1000**i for i, n in enumerate(shape))))


def squared_distances(points, centroids) -> torch.Tensor:
    """Squared distances in float64, `[codebooks, points, entries]`."""
    return (points.double()[:, :, None] - centroids.double()[:, None]).square().sum(-1)


def excess_distance(points, centroids, codes) -> torch.Tensor:
    """Squared distance of the chosen centroids minus that of the nearest ones."""
    distances = squared_distances(points, centroids)
    return distances.gather(2, codes.long()[..., None])[..., 0] - distances.amin(2)


def check(points, centroids) -> None:
    """Assert that codes lose at most twice as much as PyTorch's, and that scores are right."""
    codes, scores = assign_centroids(points, centroids, backend="triton")
    reference_codes, _ = assign_centroids_reference(points, centroids)
    scale = points.square().sum(-1).amax(1) + centroids.square().sum(-1).amax(1)  # of distances
    tolerance = scale.double()[:, None] * torch.finfo(torch.float32).eps
    assert codes.dtype == torch.uint8 and codes.shape == points.shape[:2]
    excess, theirs = (excess_distance(points, centroids, chosen) for chosen in (codes, reference_codes))
    assert (excess <= 2 * torch.maximum(theirs, tolerance)).all()
    distances = points.double().square().sum(-1) + 2 * scores.double()
    exact = squared_distances(points, centroids).amin(2)
    assert ((distances - exact).abs() <= 8 * tolerance).all()


def check_sums(columns: int, count: int, entries: int) -> None:
    """Assert that sums have at most twice the error of float32's, and are deterministic."""
    numbers = normal(2, count, columns) * torch.logspace(-30, 10, columns)
    codes = (normal(2, count).abs() * 1000).long() % entries
    index = codes[..., None].expand(-1, -1, columns)
    zeros = torch.zeros(2, entries, columns, dtype=torch.float64)
    exact, absolute_sums = (zeros.scatter_add(1, index, x.double()) for x in (numbers, numbers.abs()))
    sums = sums_by_code(numbers, codes, entries, backend="triton")
    in_torch = zeros.float().scatter_add(1, index, numbers)
    floor = absolute_sums * torch.finfo(torch.float32).eps
    assert ((sums - exact).abs() <= 2 * torch.maximum((in_torch - exact).abs(), floor)).all()
    assert torch.equal(sums, sums_by_code(numbers, codes, entries, backend="triton"))
    assert torch.allclose(sums_by_code(numbers, codes, entries, backend="torch"), exact, rtol=1e-12, atol=0)
