"""Product and residual quantization of vectors whose errors are known."""

import json

import pytest
import torch

from kvq_cli.papers.studies.quantizers import ProductQuantizer, ResidualQuantizer, mean_squared_error


@pytest.fixture
def points():
    """`[2 codebooks, 400, 4]`, Gaussian."""
    return torch.randn(2, 400, 4, generator=torch.Generator().manual_seed(0))


def test_residual_codes_are_greedy():
    books = [torch.tensor([[[0.0], [10.0]]]), torch.tensor([[[0.0], [3.0], [-6.0]]])]
    quantizer = ResidualQuantizer(books)
    codes = quantizer.encode(torch.tensor([[[4.0], [9.0], [3.2]]]))
    assert [code[0].tolist() for code in codes] == [[0, 1, 0], [1, 0, 1]]
    assert quantizer.decode(codes)[0, :, 0].tolist() == [3, 10, 3]  # 10 - 6 = 4 would be exact, but 0 is nearer to 4


def test_product_codes_are_those_of_the_pieces():
    quantizer = ProductQuantizer([torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[5.0], [9.0]]])])
    points = torch.tensor([[[0.9, 5.5], [0.2, 8.0]]])
    codes = quantizer.encode(points)
    assert [code[0].tolist() for code in codes] == [[1, 0], [0, 1]]
    assert quantizer.decode(codes).tolist() == [[[1, 5], [0, 9]]]
    assert mean_squared_error(quantizer, points) == pytest.approx((0.01 + 0.25 + 0.04 + 1) / 4)


def test_no_error_with_as_many_centroids_as_vectors(points):
    few = points[:, :16].repeat(1, 20, 1)
    for cls in (ProductQuantizer, ResidualQuantizer):
        assert mean_squared_error(cls.fit(few, 2, 16, 50, 0), few) < 1e-10


def test_quantizers_recover_sums_and_pieces_of_centroids(points):
    grid = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))[None].repeat(1, 30, 1)
    assert mean_squared_error(ProductQuantizer.fit(grid, 2, 4, 50, 0), grid) < 1e-10  # 4 values in each piece
    sums = torch.cartesian_prod(torch.tensor([-100.0, 0.0, 100.0]), torch.tensor([-1.0, 0.0, 1.0])).sum(1)
    sums = sums[None, :, None].repeat(1, 30, 2)
    assert mean_squared_error(ResidualQuantizer.fit(sums, 2, 3, 50, 0), sums) < 1e-8  # large steps, then small ones


def test_a_second_stage_of_residuals_helps(points):
    errors = [mean_squared_error(ResidualQuantizer.fit(points, stages, 16, 50, 0), points) for stages in (1, 2, 3)]
    assert errors[0] > 1.5 * errors[1] > 1.5**2 * errors[2]


def test_the_command_compares_both(kvq, tmp_path):
    options = ["entries=16", "points=64", "layers=2", "codebooks=2", "iterations=3"]
    words = [word for option in options for word in ("--set", option)]
    result = kvq("analyze", "quantizers", "--samples", 3, "--seqlen", 60, *words, "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "quantizers.json").read_text())
    numbers = document["numbers"]
    assert numbers["layers"] == [0, 7]
    assert [row[:2] for row in document["rows"]] == [[d, name] for d in (4, 8, 16) for name in ("keys", "values")]
    for place, (_, name, *more) in enumerate(document["rows"]):
        product, residual = (numbers[kind][name][place // 2] for kind in ("product", "residual"))
        expected = [100 * (r / p - 1) for p, r in zip(product, residual, strict=True)]
        assert more == pytest.approx(expected, abs=1e-2)
        assert all(0 < error < 3 for error in product + residual)
    first, last = (sum(numbers["product"]["keys"][place]) for place in (0, 2))
    assert first < last  # 16 numbers in as many bits as 4
    assert (tmp_path / "quantizers.png").stat().st_size > 10_000


def test_too_little_text_is_refused(fails):
    fails("analyze", "quantizers", "--samples", 2, "--seqlen", 64, code=2, says="raise --samples or --seqlen")
