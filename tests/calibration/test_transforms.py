"""Transforms against closed forms, and the allocation of codes against trying all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from kvq_cli.codecs.chunk_codebooks import CHUNKS

from kvq_cli.calibration.allocation import EXCESS, allocate, chunk_losses
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.transforms import SHRINKAGE, calibrate_transform, fit_transform
from kvq_cli.codecs.transform import TransformCodec

HEADS, DIM = 2, 8
SETTINGS = ClusterSettings(True, "off", points=2048, iterations=6, seed=0, dtype=torch.float32, damping=0.1)


def captured(samples: int = 4, tokens: int = 200) -> CapturedStream:
    """Correlated numbers with a mean, and gradients of unequal and correlated directions."""
    noise, width = torch.Generator().manual_seed(0), HEADS * DIM
    mix = torch.randn(width, width, generator=noise) * torch.linspace(2, 0.1, width)
    x = torch.randn(samples, tokens, width, generator=noise) @ mix + 3
    g = torch.randn(samples, tokens, width, generator=noise) @ torch.randn(width, width, generator=noise)
    x, g = (t.view(samples, tokens, HEADS, DIM).bfloat16() for t in (x, g))
    return CapturedStream(x, g, held_out=1)


def matrices(stream: CapturedStream, heads: slice) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of the training numbers and second moment of their gradients, in float64."""
    x, g = (t[:-1, :, heads].double().flatten(0, 1).flatten(1).numpy() for t in (stream.x, stream.g))
    return np.cov(x.T, bias=True), g.T @ g / len(g)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("metric", ["full", "diagonal", "none"])
def test_components_are_uncorrelated_and_their_squares_are_errors_in_the_metric(groups, metric):
    stream = captured()
    fitted = fit_transform(stream, groups, metric)
    for group in range(groups):
        heads = slice(None) if groups == 1 else slice(group, group + 1)
        covariance, fisher = matrices(stream, heads)
        scale = fisher.diagonal().mean()
        if metric == "diagonal":
            fisher = np.diag(fisher.diagonal())
        elif metric == "none":
            fisher = scale * np.eye(len(fisher))
        fisher = fisher + SHRINKAGE * scale * np.eye(len(fisher))
        analysis, synthesis = fitted.analysis[group].numpy(), fitted.synthesis[group].numpy()
        variances = fitted.variances[group].numpy()
        assert np.allclose(analysis @ synthesis, np.eye(len(fisher)), atol=1e-9)
        # ||z||^2 = x^T G x for every error x: A^T A = G; and the components' covariance is diagonal.
        assert np.allclose(analysis.T @ analysis, fisher, atol=1e-9 * abs(fisher).max())
        assert np.allclose(analysis @ covariance @ analysis.T, np.diag(variances), atol=1e-9 * variances.max())
        assert (np.diff(variances) <= 0).all()
        assert math.isclose(variances.sum(), np.trace(fisher @ covariance), rel_tol=1e-9)


def test_flat_spectrum_is_the_rate_distortion_bound():
    losses = chunk_losses(np.full(9, 3.0))
    for size, loss in losses.items():
        assert np.allclose(loss, min(1.0, EXCESS[size] * 2 ** (-16 / size)) * size * 3.0)
        assert len(loss) == 10 - size


def water_filling(variances: np.ndarray) -> float:
    """The least squared error of Gaussian components at 8 bits: theta by bisection."""

    def bits(theta: float) -> float:
        return sum(0.5 * math.log2(v / theta) for v in variances if v > theta)

    low, high = variances.max() * 1e-300, variances.max()
    for _ in range(2000):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if bits(middle) > 8 else (low, middle)
    return float(np.minimum(high, variances).sum())


def test_dead_components_get_no_bits():
    losses = chunk_losses(np.array([1.0] * 7 + [0.0]))
    assert losses[8][0] == pytest.approx(EXCESS[8] * 7 * 2 ** (-16 / 7))
    assert losses[1][7] == 0 and all(np.array_equal(loss, 0 * loss) for loss in chunk_losses(np.zeros(9)).values())


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_expected_losses_are_those_of_water_filling(spread):
    noise = np.random.default_rng(0)
    for _ in range(5):
        variances = np.sort(np.exp(noise.normal(0, spread, 11)))[::-1].copy()
        for size, losses in chunk_losses(variances).items():
            for first, loss in enumerate(losses):
                window = variances[first : first + size]
                assert loss == pytest.approx(min(EXCESS[size] * water_filling(window), window.sum()), rel=1e-9)


def brute_force(variances: list[np.ndarray], codes: int) -> float:
    """The least loss of all ways to cut the components into chunks, `codes` in all and one per group at least."""

    def layouts(values: np.ndarray, most: int):
        losses = chunk_losses(values)
        for count in range(1, most + 1):
            for lengths in itertools.product(CHUNKS, repeat=count):
                ends = np.cumsum(lengths)
                if ends[-1] <= len(values):
                    begun = zip(lengths, ends - lengths, strict=True)
                    yield count, sum(losses[size][first] for size, first in begun) + values[ends[-1] :].sum()

    every = [list(layouts(values, codes)) for values in variances]
    sums = ((sum(c for c, _ in one), sum(loss for _, loss in one)) for one in itertools.product(*every))
    return min(loss for count, loss in sums if count == codes)


@pytest.mark.parametrize("codes", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_allocation_is_the_best_of_all(codes, seed):
    noise = np.random.default_rng(seed)
    variances = [np.sort(np.exp(noise.normal(0, 2, size)))[::-1].copy() for size in (9, 6)]
    chunks = allocate(variances, codes)
    assert sum(map(len, chunks)) == codes and min(map(len, chunks)) >= 1
    total = 0.0
    for values, lengths in zip(variances, chunks, strict=True):
        losses, first = chunk_losses(values), 0
        for size in lengths:
            total += losses[size][first]
            first += size
        total += values[first:].sum()
    assert math.isclose(total, brute_force(variances, codes), rel_tol=1e-9)


def test_too_few_codes_are_refused():
    with pytest.raises(ValueError, match="1 codes are too few for 2 groups"):
        allocate([np.ones(4), np.ones(4)], 1)


def test_a_head_that_is_always_zero_is_stored_exactly():
    stream = captured()
    stream.x[:, :, 1], stream.g[:, :, 1] = 0, 0
    fitted = fit_transform(stream, 2, "full")
    tensors, _ = calibrate_transform(stream, fitted, [[1, 1, 2], [4]], SETTINGS)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    codec = TransformCodec(HEADS, tensors)
    x = stream.x.float().transpose(1, 2)
    decoded = codec.decode(codec.encode(x), torch.float32)
    assert decoded[:, 1].abs().max() < 1e-6 and (decoded[:, 0] - x[:, 0]).square().mean() < x[:, 0].var() / 4


def test_errors_of_a_constant_head_are_zero():
    """There is no spread to compare them with; joined with another head, it is decoded with an error."""
    stream = captured()
    stream.x[:, :, 1] = 0
    _, measured = calibrate_transform(stream, fit_transform(stream, 1, "full"), [[1, 1, 2]], SETTINGS)
    first, second = measured["chosen"]["fisher_per_head"]
    assert 0 < first < 1 and second == 0


def test_a_head_without_gradients_gets_one_code():
    noise = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4, 200, 3, DIM, generator=noise) for _ in range(2))
    g *= 1e-3
    g[:, :, 1] = 0
    stream = CapturedStream(x.bfloat16(), g.bfloat16(), held_out=1)
    fitted = fit_transform(stream, 3, "full")
    lengths = allocate([row.numpy() for row in fitted.variances], 3 * DIM // 4)  # 2 bits
    assert len(lengths[1]) == 1
    tensors, measured = calibrate_transform(stream, fitted, lengths, SETTINGS)
    assert all(tensor.isfinite().all() for tensor in tensors.values()) and measured["chosen"]["loss"] < 0.5


def test_mean_and_covariance_are_those_of_all_samples_but_the_held_out_ones():
    whole = captured(samples=7)
    stream = CapturedStream(whole.x, whole.g[:4], held_out=1)
    fitted = fit_transform(stream, 1, "none")
    x = whole.x[[0, 1, 2, 4, 5, 6]].double().flatten(0, 1).flatten(1).numpy()
    assert np.allclose(fitted.mean[0].numpy(), x.mean(0))
    analysis = fitted.analysis[0].numpy()
    of_components = analysis @ np.cov(x.T, bias=True) @ analysis.T
    assert np.allclose(of_components, np.diag(fitted.variances[0].numpy()), atol=1e-9 * of_components.max())
    _, gradients = matrices(CapturedStream(whole.x[:4], whole.g[:4], 1), slice(None))
    scale = gradients.diagonal().mean() * (1 + SHRINKAGE)
    assert np.allclose(analysis.T @ analysis, scale * np.eye(len(gradients)), atol=1e-9 * scale)


@pytest.mark.parametrize("groups", [1, 2])
def test_held_out_error_falls_with_every_doubling_of_codes(groups):
    stream = captured()
    fitted, errors = fit_transform(stream, groups, "full"), []
    for codes in (2, 4, 8):
        lengths = allocate([row.numpy() for row in fitted.variances], codes)
        tensors, measured = calibrate_transform(stream, fitted, lengths, SETTINGS)
        assert measured["codes"] == codes == tensors["allocation"].sum()
        errors.append(measured["chosen"]["loss"])
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]
