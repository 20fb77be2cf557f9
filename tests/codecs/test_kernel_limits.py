"""Shapes beyond the limits of the k-means kernels are left to PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.calibration.kmeans import _nearest, _sums_by_code
from kvq_cli.codecs import kernels


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Kernels are interpreted."""
    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)


@pytest.mark.parametrize(("entries", "size"), [(16, 2), (512, 2), (16, 9)])
def test_codebooks_of_any_shape_are_clustered(entries, size):
    noise = torch.Generator().manual_seed(0)
    points, centroids = (torch.randn(2, n, size, generator=noise) for n in (40, entries))
    by_kernel = entries <= 256 and size <= 8
    assert (kernels.assign_centroids(points, centroids) is not None) == by_kernel
    _, codes = _nearest(points, centroids)
    distances = torch.cdist(points.double(), centroids.double())
    assert (distances.gather(2, codes[..., None])[..., 0] - distances.amin(2)).abs().max() < 1e-3
    numbers = torch.cat([points, torch.ones(2, 40, 1)], dim=2)
    assert (kernels.sums_by_code(numbers, codes, entries) is not None) == by_kernel
    one_hot = torch.nn.functional.one_hot(codes, entries).double()
    torch.testing.assert_close(_sums_by_code(numbers, codes, entries), one_hot.mT @ numbers.double())
