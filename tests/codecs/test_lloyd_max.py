"""TurboQuant's codec against published tables, and against the equations of vLLM's implementation."""

import math

import numpy as np
import pytest
import torch
from sylvester import sylvester

from kvq_cli.codecs import lloyd_max as module
from kvq_cli.codecs.bits import unpack
from kvq_cli.codecs.lloyd_max import LloydMaxCodec, lloyd_max
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.errors import KvqError, UsageError

#: Max (1960), "Quantizing for minimum distortion", table I: positive levels and mean squared errors.
MAX_1960 = {
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_those_of_max(bits):
    positive, error = MAX_1960[bits]
    levels = np.array(lloyd_max(bits))
    np.testing.assert_allclose(levels[len(levels) // 2 :], positive, rtol=6e-4)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)
    x = np.linspace(-9, 9, 400_001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    nearest = np.abs(x[:, None] - levels).argmin(1)
    measured = np.trapezoid((x - levels[nearest]) ** 2 * density, x)
    np.testing.assert_allclose(measured, error, rtol=2e-3)


def vllm_levels(bits: int, dim: int) -> np.ndarray:
    """vLLM's centroids: Lloyd's iteration of N(0, 1 / dim) with trapezoids of 200 steps; the outer cells end at 10.5
    deviations."""
    sigma, count = dim**-0.5, 2**bits
    levels = -3.5 * sigma + 7 * sigma * (np.arange(count) + 0.5) / count
    for _ in range(200):
        edges = np.concatenate([[-10.5 * sigma], (levels[1:] + levels[:-1]) / 2, [10.5 * sigma]])
        grid = np.linspace(edges[:-1], edges[1:], 201)
        mass = np.exp(-((grid / sigma) ** 2) / 2)
        levels = np.trapezoid(grid * mass, grid, axis=0) / np.trapezoid(mass, grid, axis=0)
    return levels


def vllm_decoded(key: np.ndarray, bits: int, correct: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes, decoded keys) of `[n, dim]` keys, float64."""
    dim = key.shape[1]
    rotation = sylvester(dim).numpy() / math.sqrt(dim)
    norm = np.linalg.norm(key, axis=1, keepdims=True)
    rotated = key / (norm + 1e-8) @ rotation
    levels = vllm_levels(bits, dim)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, rotated, side="right")
    decoded = levels[codes]
    if correct:
        decoded = decoded / np.sqrt((decoded**2).sum(1, keepdims=True) + 1e-16)
    return codes, norm.astype(np.float16) * decoded @ rotation


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_those_of_vllm_but_for_its_integration(bits):
    exact = np.array(lloyd_max(bits)) / math.sqrt(128)
    np.testing.assert_allclose(vllm_levels(bits, 128), exact, rtol=0, atol=2e-3 / math.sqrt(128))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("correct", [True, False])
def test_keys_equal_those_of_vllm(bits, dim, correct, monkeypatch):
    """With vLLM's levels, so that all codes and numbers are equal but for rounding."""
    levels = torch.from_numpy(vllm_levels(bits, dim))
    tables = levels.float(), ((levels[1:] + levels[:-1]) / 2).float()
    monkeypatch.setattr(module, "_tables", lambda *_: tables)
    noise = torch.Generator().manual_seed(bits)
    x = torch.randn(1, 2, 200, dim, generator=noise) * torch.rand(1, 2, 200, 1, generator=noise) * 20
    codec = RotatedCodec(LloydMaxCodec(bits, dim, correct), HadamardRotation(dim))
    packed = codec.encode(x)
    codes, decoded = vllm_decoded(x.flatten(0, 2).double().numpy(), bits, correct)
    own = unpack(packed.parts["codes"].tensor, bits, dim).flatten(0, 2).numpy()
    same = (own == codes).all(1)
    assert same.mean() > 0.99  # a coordinate may lie on a midpoint to within rounding
    ours = codec.decode(packed, torch.float64).flatten(0, 2).numpy()
    norms = np.linalg.norm(decoded[same], axis=1, keepdims=True)
    assert (np.abs(ours[same] - decoded[same]) / norms).max() < 1e-6


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_errors_of_random_directions_are_the_distortions_of_the_paper(bits):
    """Relative squared error without norm correction: that of the scalar quantizer, for any direction rotated at
    random; here directions are random."""
    x = torch.randn(1, 1, 4000, 128, generator=torch.Generator().manual_seed(0))
    codec = RotatedCodec(LloydMaxCodec(bits, 128, correct_norm=False), HadamardRotation(128))
    error = (codec.decode(codec.encode(x), torch.float64) - x).square().sum() / x.double().square().sum()
    assert error.item() == pytest.approx(MAX_1960[bits][1], rel=0.03)


def test_norms_are_kept_and_zeros_stay_zeros():
    codec = LloydMaxCodec(2, 64)
    x = torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(4)) * 10
    x[0, 0, 0] = 0
    decoded = codec.decode(codec.encode(x), torch.float32)
    torch.testing.assert_close(decoded.norm(dim=3), x.norm(dim=3), rtol=1e-3, atol=0)
    assert not decoded[0, 0, 0].any()
    huge = torch.full((1, 1, 1, 64), 3e4)
    assert codec.decode(codec.encode(huge), torch.float32).isfinite().all()


def test_bytes_and_refusals():
    packed = LloydMaxCodec(3, 128).encode(torch.randn(1, 2, 10, 128))
    assert packed.nbytes == 1 * 2 * 10 * (128 * 3 // 8 + 2)
    with pytest.raises(UsageError, match="1, 2, 3 or 4 bits"):
        LloydMaxCodec(5, 64)
    packed.parts["norm"].tensor[0, 1, 3] = -1
    with pytest.raises(KvqError, match="norm holds numbers"):
        LloydMaxCodec(3, 128).check(packed)
