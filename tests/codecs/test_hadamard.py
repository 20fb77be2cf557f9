"""Hadamard transforms against explicit matrices, and the codec that rotates by them."""

import pytest
import torch
from sylvester import sylvester

from kvq_cli.codecs.hadamard import factors, hadamard, paley
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError


@pytest.mark.parametrize("width", [1, 2, 16, 64, 128, 256])
def test_powers_of_two_are_sylvester_matrices(width):
    matrix = sylvester(width) / width**0.5
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [12, 20, 24, 40, 80, 96, 160, 192])
def test_other_widths_are_orthonormal_matrices_of_one_magnitude(width):
    matrix = hadamard(torch.eye(width)).T.double()
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, width**-0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width).double(), rtol=0, atol=1e-6)
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hadamard(hadamard(x), inverse=True), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [12, 20])
def test_paley_matrices_have_orthogonal_rows(order):
    matrix = paley(order)
    assert torch.equal(matrix.abs(), torch.ones(order, order))
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


def test_factors():
    assert [factors(width) for width in (1, 128, 80, 96, 12)] == [(1, 1), (1, 128), (20, 4), (12, 8), (12, 1)]
    for width in (28, 72, 112):
        with pytest.raises(UsageError, match=f"Hadamard rotation of {width} channels"):
            factors(width)


@pytest.mark.parametrize("width", [64, 80, 96])
@pytest.mark.parametrize("flip", [False, True])
def test_rotation_around_no_quantization_changes_no_number(width, flip):
    codec = RotatedCodec(IdentityCodec(), HadamardRotation(width, flip))
    x = torch.randn(2, 3, 9, width, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(codec.decode(codec.encode(x), torch.float32), x, rtol=1e-5, atol=2e-6)


def test_codes_are_those_of_rotated_numbers():
    x = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(3))
    x[..., 7] *= 30  # an outlier channel, which a group of a token's channels shares its range with
    base, matrix = UniformCodec(2, "token", 64, 64), sylvester(64) / 8
    codec = RotatedCodec(base, HadamardRotation(64))
    packed, expected = codec.encode(x), base.encode((x.double() @ matrix.T).float())
    assert (packed.parts["codes"].tensor == expected.parts["codes"].tensor).double().mean() > 0.99
    error, plain = (
        (c.decode(c.encode(x), torch.float64) - x)[..., torch.arange(64) != 7].square().mean() for c in (codec, base)
    )
    assert error < 0.5 * plain
