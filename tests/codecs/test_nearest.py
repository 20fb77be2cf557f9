"""Nearest-centroid search on the integer grid against exact integer arithmetic and float64 distances."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_cli.codecs import kernels
from kvq_cli.codecs.nearest import grid_max, grid_scale, nearest, nearest_of, ranked


def grid_case(seed: int, books: int, count: int, entries: int, size: int, reach: float):
    generator = torch.Generator().manual_seed(seed)
    centroids = torch.randn(books, entries, size, generator=generator) * 10 ** float(
        torch.randn(1, generator=generator)
    )
    scale = grid_scale(centroids)
    blocks = (torch.rand(books, count, size, generator=generator) * 2 - 1) * reach
    return centroids, scale, blocks.round()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 5),
    st.sampled_from([1, 3, 255, 256, 257, 700]),
    st.sampled_from([2, 16, 256]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([2.0**17, grid_max(256)]),
)
def test_nearest_equals_integer_arithmetic(seed, books, count, entries, size, reach):
    centroids, scale, blocks = grid_case(seed, books, count, entries, size, reach)
    actual = nearest(blocks, ranked(centroids, scale))
    assert actual.dtype == torch.uint8
    assert torch.equal(actual.long(), first_nearest(blocks, centroids, scale, 2**17))


def first_nearest(blocks, centroids, scale, largest):
    """By integers."""
    c = (centroids.double() * scale.view(-1, 1, 1)).round().long()
    assert c.abs().max() <= largest
    distance = (blocks.long().unsqueeze(2) - c.unsqueeze(1)).square().sum(-1)
    return (distance == distance.amin(-1, keepdim=True)).int().argmax(-1)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("reach", [2.0**13, grid_max(65536)])
def test_nearest_of_65536_equals_integer_arithmetic(size, reach):
    centroids, scale, blocks = grid_case(7, 2, 19, 65536, size, reach)
    centroids[:, 60000:] = centroids[:, :5536]  # of equal ones, the first
    table = ranked(centroids, scale)
    actual = nearest(blocks, table)
    assert actual.dtype == torch.int16
    expected = first_nearest(blocks, centroids, scale, 2**13)
    assert torch.equal(actual.int() & 0xFFFF, expected.int()) and expected.max() > 2**15
    assert torch.equal(nearest(blocks[:, 3:4], table), actual[:, 3:4])


def test_first_of_equal_centroids_wins():
    centroids = torch.zeros(1, 256, 4)
    centroids[0, 7:] = 1.0
    actual = nearest(torch.full((1, 3, 4), 2.0**17), ranked(centroids, grid_scale(centroids)))
    assert actual.tolist() == [[7, 7, 7]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_scalars_at_a_midpoint_get_the_first_centroid(order):
    points = torch.tensor([-1.0, 0.0, 0.0, 1.0])[order].view(1, 4, 1)
    scale = grid_scale(points)
    blocks = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]).view(1, 5, 1) * scale.view(1, 1, 1)
    actual = nearest(blocks, ranked(points, scale)).long()
    assert torch.equal(actual, (blocks - scale * points.view(1, 1, 4)).abs().argmin(2))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_distances_equal_the_minimum_in_float64(size):
    """Rounding to the grid does not change the distance of the chosen centroids."""
    generator = torch.Generator().manual_seed(size)
    centroids = torch.randn(3, 256, size, generator=generator)
    points = torch.randn(3, 500, size, generator=generator)
    scale = grid_scale(centroids)
    actual = nearest((points * scale.view(-1, 1, 1)).round(), ranked(centroids, scale)).long()
    distance = torch.cdist(points.double(), centroids.double())
    chosen = distance.gather(2, actual.unsqueeze(2)).squeeze(2)
    assert (chosen - distance.amin(2)).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 4])
def test_kernels_get_the_centroids_of_the_table(dtype, size, monkeypatch):
    """Those of many magnitudes."""
    given, noise = [], torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 15, (3, 16, size), generator=noise)
    centroids = torch.ldexp(torch.randn(3, 16, size, generator=noise), exponents).to(dtype)
    blocks, scale = torch.zeros(3, 5, size), grid_scale(centroids)
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    monkeypatch.setattr(kernels, "assign_centroids", lambda _, grid: given.append(grid))
    nearest_of(blocks, centroids, scale, lambda: ranked(centroids, scale))
    of_centroids, of_table = given
    assert of_centroids.dtype == torch.float32 and torch.equal(of_centroids, of_table)
