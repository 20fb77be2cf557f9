"""K-means kernels: distances and sums against float64, and calibration that uses them."""

from __future__ import annotations

import pytest
import torch
from checks.assign_centroids import check, check_sums, normal, squared_distances
from kvq_kernels.assign_centroids import assign_centroids, sums_by_code

from kvq_cli.calibration import kmeans
from kvq_cli.codecs import kernels
from kvq_cli.codecs.codebook import CodebookCodec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 63, 65, 1000])
def test_nearest_of_256(size, count):
    check(normal(2, count, size), normal(2, 256, size))


@pytest.mark.parametrize("entries", [1, 2, 16, 200])
def test_fewer_centroids(entries):
    check(normal(3, 100, 2), normal(3, entries, 2))


@pytest.mark.parametrize("magnitude", [1e-15, 1e-3, 1e4, 1e15])
def test_any_magnitude(magnitude):
    check(normal(1, 100, 4) * magnitude, normal(1, 64, 4) * magnitude)


def test_codebooks_of_different_magnitude():
    scale = torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    check(normal(3, 50, 4) * scale, normal(3, 64, 4) * scale)


def test_far_points_are_clamped_to_the_outermost_centroid():
    centroids = torch.tensor([[[-1.0], [0.0], [1.0]]])
    codes, _ = assign_centroids(torch.tensor([[[-1e9], [1e9], [3e38]]]), centroids, backend="triton")
    assert codes.tolist() == [[0, 2, 2]]


def test_ties_go_to_the_first_centroid():
    centroids = torch.zeros(1, 256, 4)
    centroids[0, 7:] = 1.0
    codes, _ = assign_centroids(torch.full((1, 3, 4), 2.0), centroids, backend="triton")
    assert codes.tolist() == [[7, 7, 7]]


def test_codes_do_not_depend_on_other_points():
    points, centroids = normal(2, 300, 4), normal(2, 256, 4)
    codes, scores = assign_centroids(points, centroids, backend="triton")
    own, own_scores = assign_centroids(points[1:, 201:208], centroids[1:], backend="triton")
    if torch.cuda.is_available():
        assert torch.equal(own[0], codes[1, 201:208]) and torch.equal(own_scores[0], scores[1, 201:208])
    # The interpreter's matrix products are numpy's, whose last bit depends on where a row lies.
    torch.testing.assert_close(own_scores[0], scores[1, 201:208], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [2, 3, 5, 9])
@pytest.mark.parametrize("count, entries", [(1, 256), (7, 16), (1000, 256), (1300, 2)])
def test_sums(columns, count, entries):
    check_sums(columns, count, entries)


def test_outputs_are_fully_written(monkeypatch):
    def poisoned(*shape, dtype=None, device=None, make=torch.empty):
        return make(*shape, dtype=dtype, device=device).fill_(torch.nan if dtype == torch.float32 else 77)

    points, centroids = normal(2, 70, 4), normal(2, 20, 4)
    expected = assign_centroids(points, centroids, backend="triton")
    monkeypatch.setattr(torch, "empty", poisoned)
    actual = assign_centroids(points, centroids, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_calibration_with_kernels_is_as_good_as_on_a_cpu(monkeypatch):
    points, weights = normal(2, 300, 4), normal(2, 300).abs() ** 4

    def error(centroids):
        return (weights.double() * squared_distances(points, centroids).amin(2)).sum(-1)

    on_cpu = kmeans.weighted_kmeans(points, weights, 16, iterations=4)
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    on_gpu = kmeans.weighted_kmeans(points, weights, 16, iterations=4)
    assert torch.equal(on_gpu, kmeans.weighted_kmeans(points, weights, 16, iterations=4))
    assert torch.allclose(error(on_gpu), error(on_cpu), rtol=0.1)


@pytest.mark.parametrize("block", [(4, 1), (1, 1), (1, 8)])
def test_encoding_with_kernels_is_as_good_as_on_a_cpu(monkeypatch, block):
    size = block[0] * block[1]
    codec = CodebookCodec(normal(1, 16 // size, 256, size), block, 16)
    x = normal(2, 1, 40, 16)
    on_cpu = codec.decode(codec.encode(x), torch.float32)
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    packed = codec.encode(x)
    on_gpu = codec.decode(packed, torch.float32)
    assert torch.allclose((on_gpu - x).square().sum(), (on_cpu - x).square().sum(), rtol=1e-5)
    part = codec.encode(x[:1, :, 8:16]).parts["codes"].tensor
    first = 8 // block[0]
    assert torch.equal(part, packed.parts["codes"].tensor[:1, :, first : first + part.shape[2]])


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        assign_centroids(normal(2, 5, 4), normal(1, 5, 4))
    with pytest.raises(ValueError, match="at most 256"):
        assign_centroids(normal(1, 5, 4), normal(1, 257, 4))
    with pytest.raises(ValueError, match="do not fit"):
        sums_by_code(normal(1, 5, 10), torch.zeros(1, 5), 4)
