"""Transforms and steps against closed forms, and what is stored against what was expected."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.profiles import Profiles
from kvq_cli.calibration.transforms import (
    SHRINKAGE,
    TransformSettings,
    calibrate_transform,
    effective_tokens,
    fit_transform,
    half_of,
)
from kvq_cli.calibration.uniform_steps import squared_losses
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.methods.transform_specs import Profile

HEADS, DIM = 2, 16
PLAIN = TransformSettings(groups=2, metric="full", gain=False, fisher=True, damping=0.0)
WITH_GAIN = replace(PLAIN, gain=True)


def captured(samples: int = 4, tokens: int = 208) -> CapturedStream:
    """Correlated numbers with a mean, of unequal norms, and gradients of unequal and correlated directions."""
    noise, width = torch.Generator().manual_seed(0), HEADS * DIM
    mix = torch.randn(width, width, generator=noise) * torch.linspace(2, 0.1, width)
    norms = torch.linspace(-1, 1, tokens).exp().unsqueeze(1)
    x = torch.randn(samples, tokens, width, generator=noise) @ mix * norms + 3
    g = torch.randn(samples, tokens, width, generator=noise) @ torch.randn(width, width, generator=noise)
    x, g = (t.view(samples, tokens, HEADS, DIM).bfloat16() for t in (x, g))
    return CapturedStream(x, g, held_out=1)


def training(stream: CapturedStream, heads: slice) -> tuple[np.ndarray, np.ndarray]:
    """Centered numbers and gradients of the training samples, `[tokens, channels]` float64."""
    x, g = (t[:-1, :, heads].double().flatten(0, 1).flatten(1).numpy() for t in (stream.x, stream.g))
    return x - x.mean(0), g


def second_moment(x: np.ndarray) -> np.ndarray:
    return x.T @ x / len(x)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("metric", ["full", "diagonal", "none"])
@pytest.mark.parametrize("gain", [False, True])
def test_components_are_uncorrelated_and_their_squares_are_errors_in_the_metric(groups, metric, gain):
    """With gains, those of (x - mean) / gain, in the metric of gradients times gain."""
    stream = captured()
    settings = TransformSettings(groups, metric, gain=gain, fisher=True, damping=0.0)
    first = fit_transform(stream, replace(settings, gain=False))
    fitted = fit_transform(stream, settings)
    for group in range(groups):
        x, g = training(stream, slice(None) if groups == 1 else slice(group, group + 1))
        assert np.allclose(fitted.std[group].numpy(), x.std(0))
        if gain:
            kept = half_of(x.shape[1])
            z = x @ first.analysis[group, :kept].numpy().T / first.variances[group, :kept].sqrt().numpy()
            gains = 2 ** (np.round(16 * np.log2((z**2).mean(1)) / 2) / 16)[:, None]
            x, g = x / gains, g * gains
        covariance, fisher = second_moment(x), second_moment(g)
        scale = fisher.diagonal().mean()
        if metric == "diagonal":
            fisher = np.diag(fisher.diagonal())
        elif metric == "none":
            fisher = scale * np.eye(len(fisher))
        fisher = fisher + SHRINKAGE * scale * np.eye(len(fisher))
        analysis, synthesis = fitted.analysis[group].numpy(), fitted.synthesis[group].numpy()
        variances, tolerance = (
            fitted.variances[group].numpy(),
            1e-3 if gain else 1e-9,
        )  # a gain may be rounded elsewhere
        assert np.allclose(analysis @ synthesis, np.eye(len(fisher)), atol=1e-9)
        # ||z||^2 = x^T G x for every error x: A^T A = G; and the components' covariance is diagonal.
        assert np.allclose(analysis.T @ analysis, fisher, atol=tolerance * abs(fisher).max())
        assert np.allclose(analysis @ covariance @ analysis.T, np.diag(variances), atol=tolerance * variances.max())
        assert (np.diff(variances) <= 0).all()
        assert math.isclose(variances.sum(), np.trace(fisher @ covariance), rel_tol=tolerance)


def test_mean_and_covariance_are_those_of_all_samples_but_the_held_out_ones():
    whole = captured(samples=7)
    stream = CapturedStream(whole.x, whole.g[:4], held_out=1)
    fitted = fit_transform(stream, replace(PLAIN, groups=1, metric="none"))
    x = whole.x[[0, 1, 2, 4, 5, 6]].double().flatten(0, 1).flatten(1).numpy()
    assert np.allclose(fitted.mean[0].numpy(), x.mean(0))
    analysis = fitted.analysis[0].numpy()
    of_components = analysis @ np.cov(x.T, bias=True) @ analysis.T
    assert np.allclose(of_components, np.diag(fitted.variances[0].numpy()), atol=1e-9 * of_components.max())
    _, g = training(CapturedStream(whole.x[:4], whole.g[:4], 1), slice(None))
    scale = second_moment(g).diagonal().mean() * (1 + SHRINKAGE)
    assert np.allclose(analysis.T @ analysis, scale * np.eye(len(analysis)), atol=1e-9 * scale)


#: Squared errors of the best uniform codes of 1 to 5 bits for normal numbers of deviation 1 (Max, 1960).
MAX_1960 = (0.3634, 0.1188, 0.03744, 0.01154, 0.003495)


@pytest.mark.parametrize("width", range(1, 6))
def test_steps_for_normal_numbers_are_those_of_max(width):
    y = 3 * torch.randn(2, 20000, 4, generator=torch.Generator().manual_seed(width))
    step, loss = squared_losses(y, torch.full_like(y, 0.5), width)
    assert torch.allclose(loss, torch.full((2, 4), 0.5 * 9 * MAX_1960[width - 1], dtype=torch.float64), rtol=0.1)
    low = 2 ** (width - 1)
    error = step.unsqueeze(1) * ((y / step.unsqueeze(1)).floor().clamp(-low, low - 1) + 0.5) - y
    assert torch.allclose(loss, (0.5 * error.square()).double().mean(1), rtol=1e-4)


def test_steps_are_chosen_by_weighted_errors():
    """No step of a fine grid loses much less; small numbers have the weight here."""
    y = torch.randn(1, 4000, 1, generator=torch.Generator().manual_seed(0))
    weights = (y.abs() < 0.5).float() + 0.01
    _, loss = squared_losses(y, weights, 3)
    grid = torch.linspace(0.02, 1, 200)
    errors = [(((y / step).floor().clamp(-4, 3) + 0.5) * step - y).square() * weights for step in grid]
    assert loss.item() < 1.1 * min(error.double().mean().item() for error in errors)


@pytest.mark.parametrize("settings", [PLAIN, WITH_GAIN, replace(WITH_GAIN, metric="none", fisher=False, damping=0.1)])
def test_expected_losses_are_those_of_stored_codes(settings):
    """Of all training tokens, decoded by the codec: squared errors of components times gradients."""
    stream = captured()
    fitted = fit_transform(stream, settings)
    widths = (5, 3)
    tensors, measured = calibrate_transform(stream, fitted, Profile((widths,) * HEADS, settings.gain), "k", settings)
    codec = TransformCodec(HEADS, tensors, values=False)
    x = stream.x[:-1].float().transpose(1, 2)
    error = (codec.decode(codec.encode(x), torch.float32) - x).transpose(0, 1).flatten(1, 2).double()  # [H, N, D]
    error = error @ fitted.analysis.mT
    if settings.fisher:
        g = stream.g[:-1].double().permute(2, 0, 1, 3).flatten(1, 2)
        error *= g @ fitted.synthesis
    expected = Profiles(fitted.losses.sum(0).numpy()).loss(widths)
    kept = 8 * len(widths)
    if not settings.gain or kept == half_of(DIM):
        assert error.square().sum().item() / error.shape[1] == pytest.approx(expected, rel=1e-3)
    assert measured["bytes"] == 2 * (8 + settings.gain)


def test_a_head_that_is_always_zero_is_stored_exactly():
    stream = captured()
    stream.x[:, :, 1], stream.g[:, :, 1] = 0, 0
    for settings in (PLAIN, WITH_GAIN):
        fitted = fit_transform(stream, settings)
        tensors, measured = calibrate_transform(
            stream, fitted, Profile(((4, 4),) * HEADS, settings.gain), "v", settings
        )
        assert all(tensor.isfinite().all() for tensor in tensors.values())
        codec = TransformCodec(HEADS, tensors, values=True)
        x = stream.x.float().transpose(1, 2)
        decoded = codec.decode(codec.encode(x), torch.float32)
        assert not decoded[:, 1].any() and (decoded[:, 0] - x[:, 0]).square().mean() < x[:, 0].var() / 4
        first, second = measured["chosen"]["fisher_per_head"]
        assert 0 < first < 1 and second == 0


def test_a_head_without_gradients_costs_nothing():
    noise = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4, 208, 3, DIM, generator=noise) for _ in range(2))
    g *= 1e-3
    g[:, :, 1] = 0
    stream = CapturedStream(x.bfloat16(), g.bfloat16(), held_out=1)
    settings = replace(WITH_GAIN, groups=3)
    alone = CapturedStream(stream.x[:, :, [0, 2]], stream.g[:, :, [0, 2]], held_out=1)
    fitted, without = fit_transform(stream, settings), fit_transform(alone, WITH_GAIN)
    assert torch.allclose(fitted.losses[[0, 2]], without.losses) and fitted.losses[1].max() < without.losses[0].min()
    tensors, measured = calibrate_transform(stream, fitted, Profile(((2, 2),) * 3, True), "k", settings)
    assert all(tensor.isfinite().all() for tensor in tensors.values()) and measured["chosen"]["loss"] < 0.5


def test_a_stream_without_gradients_is_calibrated():
    stream = captured()
    stream.g.zero_()
    fitted = fit_transform(stream, WITH_GAIN)
    assert not fitted.losses.any()
    profile = Profile((Profiles(fitted.losses.sum(0).numpy()).best(1),) * HEADS, True)
    tensors, measured = calibrate_transform(stream, fitted, profile, "k", WITH_GAIN)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert measured["effective_tokens"] == 0 and measured["chosen"]["plain"] < 1


def test_effective_tokens_are_those_of_equal_weights():
    """n tokens with all the weight, equally: n."""
    stream = captured()
    stream.g.zero_()
    stream.g[0, 10:17] = 2
    assert effective_tokens(stream) == pytest.approx(7)
    stream.g[-1, 3] = 5  # held out
    assert effective_tokens(stream) == pytest.approx(7)


@pytest.mark.parametrize("groups", [1, 2])
def test_held_out_error_falls_with_bits(groups):
    stream, settings = captured(), replace(WITH_GAIN, groups=groups)
    fitted, errors = fit_transform(stream, settings), []
    for bits in (1, 2, 4, 8):
        profile = Profile(((bits,) * (HEADS * DIM // groups // 8),) * groups, True)
        _, measured = calibrate_transform(stream, fitted, profile, "k", settings)
        errors.append(measured["chosen"]["loss"])
    assert errors[0] > 2 * errors[1] > 10 * errors[2] > 200 * errors[3] > 0


def test_heads_of_different_widths_have_the_steps_of_each_alone():
    stream = captured()
    fitted, widths = fit_transform(stream, WITH_GAIN), ((5, 3), (2,))
    tensors, _ = calibrate_transform(stream, fitted, Profile(widths, True), "k", WITH_GAIN)
    assert tensors["widths"].tolist() == [[5, 3], [2, 0]]
    for head, own in enumerate(widths):
        same, _ = calibrate_transform(stream, fitted, Profile((own,) * HEADS, True), "k", WITH_GAIN)
        for name, x in same.items():
            if name != "widths":
                stored = tensors[name][head][tuple(map(slice, x.shape[1:]))]
                torch.testing.assert_close(stored, x[head], rtol=1e-5, atol=1e-8)
    assert not any(tensors[name][1, 8:].any() for name in ("analysis", "center", "deviation"))
    assert not tensors["synthesis"][1, :, 8:].any()
