"""KVQuant against its equations in float64, on random and real keys and values; cost, refusals."""

import numpy as np
import pytest
import torch

from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def plan_for(method, shape, tensors_for):
    return method.plan(0, shape, tensors_for(method.calibration(shape), shape, [0] * shape.kv_heads))


def numbers(shape, tokens=64, batch=2):
    x = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, generator=torch.Generator().manual_seed(1))
    return (x + 0.1 * x**3).to(shape.torch_dtype)


def keys_by_equations(x, tensors, capacity):
    """Decoded keys in float64; NaN where two points are about equally near."""
    x, points = x.double().numpy(), tensors["k.centroids.scalar"].double().numpy().ravel()
    mean, std = (tensors[f"k.{name}"].double().numpy()[:, None] for name in ("mean", "std"))
    distance = np.abs(((x - mean) / std)[..., None] - points)
    near = np.sort(distance, axis=-1)
    out = points[distance.argmin(-1)] * std + mean
    out[near[..., 1] - near[..., 0] < 1e-3] = np.nan
    if capacity:
        low, high = (tensors[f"k.{name}"].double().numpy()[:, None] for name in ("lower", "upper"))
        outside = np.maximum(x - high, low - x) / (high - low)
        for b, h, t in np.ndindex(x.shape[0], x.shape[1], x.shape[2] // 32):
            block = np.s_[b, h, 32 * t : 32 * t + 32]
            kept = np.argsort(-outside[block].ravel(), kind="stable")[:capacity]
            out[block].ravel()[kept] = x[block].ravel()[kept]
    return torch.from_numpy(out)


def assert_keys(codec, x, tensors, capacity):
    expected = keys_by_equations(x, tensors, capacity)
    decoded, clear = codec.decode(codec.encode(x), torch.float64), ~expected.isnan()
    assert clear.float().mean() > 0.8
    # Places that tie for the last one of a block are the few that may differ.
    assert ((decoded - expected)[clear].abs() < 1e-4).float().mean() > 0.9995


@pytest.mark.parametrize("outliers", [0, 0.01])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_keys_are_the_nearest_points_of_scaled_channels(bits, outliers, shape, tensors_for):
    method = build("kvquant", bits=bits, outliers=outliers)
    tensors = tensors_for(method.calibration(shape), shape, [0, 0])
    codec = method.plan(0, shape, tensors).keys.codec
    assert_keys(codec, numbers(shape), tensors, int(outliers * 32 * 64))


@pytest.mark.parametrize("outliers", [0, 0.01])
def test_real_keys_equal_the_equations(outliers, captured, calibrated):
    plan, tensors = calibrated(build("kvquant", outliers=outliers))
    keys = captured["k"].x[:2].transpose(1, 2)
    assert_keys(plan.keys.codec, keys, tensors, int(outliers * 32 * 64))


@pytest.mark.parametrize("outliers", [0, 0.02])
def test_key_thresholds_are_quantiles_of_the_calibration_text(outliers, captured, calibrated):
    _, tensors = calibrated(build("kvquant", outliers=outliers))
    seen = captured["k"].x[:4].double().flatten(0, 1).numpy()
    low, high = np.quantile(seen, [outliers / 2, 1 - outliers / 2], axis=0)
    assert np.allclose(tensors["k.mean"], (low + high) / 2, atol=1e-5)
    assert np.allclose(tensors["k.std"], (high - low) / 2, atol=1e-5)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_calibrated_points_are_converged(kind, captured, calibrated):
    """Further Lloyd iterations in float64 on all numbers of the layer lower the error little."""
    _, tensors = calibrated(build("kvquant", bits=3, outliers=0))
    x, g = (t[:4].double().numpy() for t in (captured[kind].x, captured[kind].g))
    if kind == "k":
        zero, scale = tensors["k.mean"].double().numpy(), tensors["k.std"].double().numpy()
    else:
        low, high = (edge(x, axis=(2, 3), keepdims=True) for edge in (np.min, np.max))
        zero, scale = (high + low) / 2, (high - low) / 2
    u, w = ((x - zero) / scale).ravel(), np.square(g * scale).ravel()
    points = tensors[f"{kind}.centroids.scalar"].double().numpy().ravel()
    errors = []
    for _ in range(40):
        codes = np.abs(u[:, None] - points).argmin(1)
        errors.append((w * np.square(u - points[codes])).sum())
        points = np.bincount(codes, w * u, len(points)) / np.bincount(codes, w, len(points))
    assert errors[0] < 1.1 * errors[-1]


def test_all_numbers_as_outliers_is_exact(shape_of, tensors_for):
    for shape in (shape_of(), shape_of(kv_heads=1, head_dim=80, dtype=torch.bfloat16)):
        plan = plan_for(build("kvquant", outliers=1), shape, tensors_for)
        x = numbers(shape)
        for stream in (plan.keys, plan.values):
            assert torch.equal(stream.codec.decode(stream.codec.encode(x), x.dtype), x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_bits_per_number(bits, shape_of, tensors_for):
    shape = shape_of(kv_heads=8, head_dim=128)
    x = numbers(shape, batch=1)
    kept = int(0.01 * 32 * 128) / (32 * 128)
    start = 9 * 32 / (32 * 1024)
    for outliers, keys, values in (
        (0, bits, bits + 32 / 1024),
        (0.01, bits + 32 * kept, bits + 32 * 11 / 1024 + start),
    ):
        plan = plan_for(build("kvquant", bits=bits, outliers=outliers), shape, tensors_for)
        assert plan.keys.codec.encode(x).nbytes * 8 / x.numel() == keys
        assert plan.values.codec.encode(x).nbytes * 8 / x.numel() == values
        assert plan.keys.codec.nominal_bits == plan.values.codec.nominal_bits == bits


def test_keys_and_values_of_a_layer_store_one_codebook_each(shape, tensors_for):
    plan = plan_for(build("kvquant", bits=3), shape, tensors_for)
    for stream in (plan.keys, plan.values):
        assert stream.codec.constants()["centroids"].shape == (1, 1, 8, 1)


def test_sources_and_windows(shape, tensors_for):
    plan = plan_for(build("kvquant", sinks=4, recent=16), shape, tensors_for)
    assert (plan.keys.source, plan.values.source) == ("pre_rope", "value")
    assert isinstance(plan.keys.codec, OutlierCodec) and isinstance(plan.values.codec, PerTokenCodec)
    assert plan.keys.window == plan.values.window == Window(4, 16, 32)  # outliers are kept by blocks of 32 tokens
    plan = plan_for(build("kvquant", outliers=0), shape, tensors_for)
    assert isinstance(plan.keys.codec, CodebookCodec)
    assert plan.keys.window == plan.values.window == Window(8, 0, 1)


@pytest.mark.slow
def test_outliers_bits_and_weights_lower_the_error(held_out_error):
    def error(kind, seen=False, weighted=True, **options):
        return held_out_error(build("kvquant", **options), kind, seen, weighted)

    for kind in "kv":
        by_bits = [error(kind, bits=bits) for bits in (1, 2, 3, 4, 8)]
        assert all(more < 0.75 * fewer for fewer, more in zip(by_bits, by_bits[1:], strict=False))
        # Unweighted: numbers that find no room among the outliers may weigh more than all others (the cap does that).
        assert error(kind, weighted=False) < 0.95 * error(kind, weighted=False, outliers=0)
        # Without outliers, so that k-means makes small just what is measured.
        fisher, plain = (error(kind, seen=True, bits=1, outliers=0, fisher=on) for on in (True, False))
        assert fisher < plain


def test_invalid_options_are_refused(shape, tensors_for):
    with pytest.raises(UsageError, match=r"kvquant: bits=5 is not one of 1, 2, 3, 4, 8 \(others cannot be packed"):
        build("kvquant", bits=5)
    method = build("kvquant")
    with pytest.raises(UsageError, match="kvquant needs an artifact: run `kvq calibrate --method kvquant`"):
        method.plan(0, shape, {})
    with pytest.raises(UsageError, match=r"outliers=1e-05: a block of 32 tokens by 64 channels needs a fraction of"):
        build("kvquant", outliers=1e-5).calibration(shape)
    tensors = tensors_for(method.calibration(shape), shape, [0, 0])
    for name in ("k.choice", "k.mean", "k.upper", "v.centroids.scalar"):
        with pytest.raises(KvqError, match=rf"no tensor layers.3.{name}; calibrate again"):
            method.plan(3, shape, {key: t for key, t in tensors.items() if key != name})
