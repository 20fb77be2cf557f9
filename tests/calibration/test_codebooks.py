"""Codebooks of one stream: errors as measured with the method's codec, choice of block shapes, Fisher weights."""

import dataclasses
import itertools

import pytest
import torch

from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import _cluster, _prepare, calibrate_stream, choose_shapes
from kvq_cli.calibration.kmeans_scalar import scalar_kmeans
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.per_token import PerTokenCodec, split_outliers
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import BlockShape, CodebookSpec
from kvq_cli.methods.temporalkv import TemporalKV

SHAPE = ModelShape(layers=1, query_heads=4, kv_heads=2, head_dim=8, hidden_size=32, dtype="float32")
BOTH = (BlockShape("temporal", 4, 1), BlockShape("channel", 1, 4))
SETTINGS = ClusterSettings(fisher=True, hybrid="layer", points=4096, iterations=20, seed=0, dtype=torch.float32)
SPEC = CodebookSpec(BOTH, entries=256, share=4, normalize=True)


@pytest.fixture(scope="module")
def captured():
    """Head 0 correlates adjacent tokens, head 1 adjacent channels; large numbers have large gradients."""
    noise = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=noise)

    x = normal(10, 480, 2, 8)
    x[:, :, 0] = normal(10, 120, 8).repeat_interleave(4, dim=1) + 0.2 * x[:, :, 0]
    x[:, :, 1] = normal(10, 480, 2).repeat_interleave(4, dim=2) + 0.2 * x[:, :, 1]
    matters = (x > 1.2).float()  # few numbers carry most of the weight
    x = x * torch.linspace(0.5, 3, 8) + torch.linspace(-4, 4, 8)
    g = normal(8, 480, 2, 8) * (0.05 + 3 * matters[:8])
    return CapturedStream(x.bfloat16(), g.bfloat16(), held_out=2)


def errors_by_codec(tensors, captured, method, kind="k"):
    """Relative held-out errors (fisher, plain) of the method's own codec, in float64."""
    codec = method.plan(0, SHAPE, {f"{k}.{n}": t for k in "kv" for n, t in tensors.items()})
    codec = (codec.keys if kind == "k" else codec.values).codec
    x, g = captured.x[6:8].transpose(1, 2).float(), captured.g[6:8].transpose(1, 2).double()
    seen = torch.cat([captured.x[:6], captured.x[8:]]).double()
    errors = (codec.decode(codec.encode(x), torch.float32) - x).double() ** 2
    spread = (x.double() - seen.mean((0, 1))[:, None]) ** 2
    return [((w * errors).sum() / (w * spread).sum()).item() for w in (g**2, torch.ones_like(g))]


@pytest.mark.parametrize(("hybrid", "normalize"), [("off", True), ("layer", True), ("head", True), ("head", False)])
def test_reported_errors_are_those_of_the_codec(captured, hybrid, normalize):
    method = TemporalKV(hybrid=hybrid, normalize_keys=normalize)
    spec = method.calibration(SHAPE).keys
    tensors, measured = calibrate_stream(captured, spec, dataclasses.replace(SETTINGS, hybrid=hybrid))
    fisher, plain = errors_by_codec(tensors, captured, method)
    assert measured["chosen"]["fisher"] == pytest.approx(fisher, rel=0.01)
    assert measured["chosen"]["plain"] == pytest.approx(plain, rel=0.01)
    assert ("mean" in tensors) == ("std" in tensors) == normalize


@pytest.mark.slow  # 65,536 centroids
def test_reported_errors_of_large_codebooks_are_those_of_the_codec():
    pytest.importorskip("faiss")
    noise = torch.Generator().manual_seed(0)
    x, g = (torch.randn(10, 4096, 2, 8, generator=noise) for _ in range(2))
    captured = CapturedStream(x.bfloat16(), g[:8].bfloat16(), held_out=2)
    method = TemporalKV(hybrid="off", bits=4, entries=65536)
    settings = dataclasses.replace(SETTINGS, iterations=1, engine="faiss")
    tensors, measured = calibrate_stream(captured, method.calibration(SHAPE).values, settings)
    assert tensors["centroids.temporal"].shape == (1, 1, 65536, 4)
    _, plain = errors_by_codec(tensors, captured, method, "v")
    assert measured["chosen"]["plain"] == pytest.approx(plain, rel=0.01) and plain < 0.02


def test_errors_of_a_constant_head_are_zero(captured):
    """There is no spread to compare them with; its centroids are rounded."""
    x = captured.x.clone()
    x[:, :, 1] = 1e-7 * torch.linspace(-2, 2, 8)
    spec, settings = dataclasses.replace(SPEC, normalize=False), dataclasses.replace(SETTINGS, dtype=torch.float16)
    _, measured = calibrate_stream(dataclasses.replace(captured, x=x), spec, settings)
    for entry in (measured["chosen"], *measured["shapes"].values()):
        first, second = entry["fisher_per_head"]
        assert 0 < first < 1 and second == 0


def test_outliers_are_excluded_from_errors(captured):
    spec = dataclasses.replace(SPEC, outliers=0.02)
    tensors, measured = calibrate_stream(captured, spec, SETTINGS)
    seen = torch.cat([captured.x[:6], captured.x[8:]]).float()
    inside = (seen >= tensors["lower"]) & (seen <= tensors["upper"])
    assert inside.float().mean() == pytest.approx(0.98, abs=0.005)
    fisher, plain = errors_by_codec(tensors, captured, TemporalKV(hybrid="layer", outliers=0.02))
    # The codec ignores them also when it chooses codes, so that its errors are lower still.
    assert 0.7 * measured["chosen"]["fisher"] < fisher <= measured["chosen"]["fisher"]
    assert 0.7 * measured["chosen"]["plain"] < plain <= measured["chosen"]["plain"]


SCALAR = CodebookSpec((BlockShape("scalar", 1, 1),), entries=4, share=1, normalize=True, outliers=0.02)


@pytest.mark.parametrize("fisher", [False, True])
def test_outliers_do_not_move_centroids(captured, fisher):
    """Centroids are those of the inliers alone; with Fisher weights, damping gives outliers no weight either."""
    settings = dataclasses.replace(SETTINGS, fisher=fisher, damping=1e6, iterations=200)
    few = CapturedStream(captured.x[:5, :100], captured.g[:5, :100], held_out=1)  # few enough to cut anywhere
    stream = _prepare(few, SCALAR, torch.float32)
    found = _cluster(stream, SCALAR.shapes[0], SCALAR, settings).squeeze(3)
    x, (lower, upper) = few.x[:4].float(), (stream.constants[name] for name in ("lower", "upper"))
    inlier = (x >= lower) & (x <= upper)
    for head, channel in itertools.product(range(2), range(8)):
        u = stream.u[:, :, head, channel].flatten()
        inside = u[inlier[:, :, head, channel].flatten()]
        assert len(inside) < len(u)
        expected = scalar_kmeans(inside[None], torch.ones(1, len(inside)), 4, 200)[0]
        torch.testing.assert_close(found[head, channel], expected, rtol=1e-3, atol=1e-3)


def test_hybrid_chooses_the_shape_with_the_lowest_error(captured):
    """Temporal blocks fit head 0, channel blocks head 1."""
    found = {}
    for hybrid in ("off", "layer", "head"):
        tensors, found[hybrid] = calibrate_stream(captured, SPEC, dataclasses.replace(SETTINGS, hybrid=hybrid))
        for shape in BOTH:
            heads = [i for i, name in enumerate(found[hybrid]["choice"]) if name == shape.name]
            assert (f"centroids.{shape.name}" in tensors) == bool(heads)
            if heads:
                assert tensors[f"centroids.{shape.name}"].shape == (len(heads), 2, 256, 4)
    assert found["off"]["choice"] == ["temporal", "temporal"]
    assert found["head"]["choice"] == ["temporal", "channel"]
    assert len(set(found["layer"]["choice"])) == 1
    shapes = found["off"]["shapes"]
    assert shapes == found["layer"]["shapes"] == found["head"]["shapes"]
    best = min(shape["fisher"] for shape in shapes.values())
    assert found["layer"]["chosen"]["fisher"] == best
    assert found["head"]["chosen"]["fisher"] < best


def test_choose_shapes_minimizes_the_error_per_head_or_layer():
    errors = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).double()
    by_head = choose_shapes(errors, "head")
    assert all(errors[by_head[h], h] == errors[:, h].min() for h in range(3))
    by_layer = choose_shapes(errors, "layer")
    assert len(set(by_layer.tolist())) == 1 and errors[by_layer[0]].sum() == errors.sum(1).min()
    assert choose_shapes(errors, "off").tolist() == [0, 0, 0]


def test_fisher_weights_lower_the_weighted_error_and_raise_the_plain_one(captured):
    for shape, normalize in itertools.product(BOTH, (True, False)):
        spec = dataclasses.replace(SPEC, shapes=(shape,), normalize=normalize)
        with_, without = (
            calibrate_stream(captured, spec, dataclasses.replace(SETTINGS, fisher=fisher))[1]["chosen"]
            for fisher in (True, False)
        )
        assert with_["fisher"] < 0.9 * without["fisher"]
        assert with_["plain"] > without["plain"]


def test_damping_trades_the_weighted_error_for_the_plain_one(captured):
    spec = dataclasses.replace(SPEC, shapes=BOTH[:1])
    settings = [dataclasses.replace(SETTINGS, damping=damping) for damping in (0.0, 0.1, 1e6)]
    settings.append(dataclasses.replace(SETTINGS, fisher=False))
    found = [calibrate_stream(captured, spec, one)[1]["chosen"] for one in settings]
    fisher, plain = [one["fisher"] for one in found], [one["plain"] for one in found]
    assert fisher[0] < fisher[1] < fisher[2] and plain[0] > plain[1] > plain[2]
    assert fisher[2] == pytest.approx(fisher[3], rel=0.02) and plain[2] == pytest.approx(plain[3], rel=0.02)


def test_per_channel_range_spec_of_kvquant_keys(captured):
    """KVQuant's keys: one number at a time, channels scaled to [-1, 1] by their thresholds, one codebook for all."""
    spec = CodebookSpec(
        (BlockShape("scalar", 1, 1),),
        entries=4,
        share=8,
        normalize=True,
        by_range=True,
        across_heads=True,
        outliers=0.02,
    )
    tensors, measured = calibrate_stream(captured, spec, dataclasses.replace(SETTINGS, hybrid="off"))
    books, lower, upper = tensors["centroids.scalar"], tensors["lower"], tensors["upper"]
    assert books.shape == (1, 1, 4, 1) and books.abs().max() <= 1
    assert torch.allclose(tensors["mean"] - tensors["std"], lower, atol=1e-5)
    assert torch.allclose(tensors["mean"] + tensors["std"], upper, atol=1e-5)
    codec = CodebookCodec(books, (1, 1), 8, tensors["mean"], tensors["std"])
    x, g = captured.x[6:8].transpose(1, 2).float(), captured.g[6:8].transpose(1, 2).float()
    errors = (g * (codec.decode(codec.encode(x), torch.float32) - x)).square()
    inside = (x >= lower[:, None]) & (x <= upper[:, None])
    mean = torch.cat([captured.x[:6], captured.x[8:]]).float().mean((0, 1))[:, None]
    spread = (g * (x.clamp(lower[:, None], upper[:, None]) - mean)).square()
    assert measured["chosen"]["fisher"] == pytest.approx((errors[inside].sum() / spread[inside].sum()).item(), rel=0.02)


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_per_token_errors_are_those_of_the_codec(captured, outliers):
    """KVQuant's values: only the codebook is calibrated, range and outliers are computed per token."""
    spec = CodebookSpec((BlockShape("scalar", 1, 1),), 4, 8, False, outliers, per_token=True, across_heads=True)
    tensors, measured = calibrate_stream(captured, spec, dataclasses.replace(SETTINGS, hybrid="off"))
    assert set(tensors) == {"choice", "centroids.scalar"} and tensors["centroids.scalar"].shape == (1, 1, 4, 1)
    codec = PerTokenCodec(CodebookCodec(tensors["centroids.scalar"], (1, 1), 8), 2, 8, outliers, torch.float32)
    x, g = captured.x[6:8].transpose(1, 2).float(), captured.g[6:8].transpose(1, 2).float()
    packed = codec.encode(x)
    kept = torch.zeros(2, 480, 16, dtype=torch.bool)
    if outliers:
        kept.scatter_(2, split_outliers(x.transpose(1, 2).flatten(2), outliers)[1], True)
        assert kept.sum(2).unique().tolist() == [1]
    inside = ~kept.unflatten(2, (2, 8)).transpose(1, 2)
    mean = torch.cat([captured.x[:6], captured.x[8:]]).float().mean((0, 1))[:, None]
    errors, spread = g * (codec.decode(packed, torch.float32) - x), g * (x - mean)
    expected = errors[inside].square().sum() / spread[inside].square().sum()
    assert measured["chosen"]["fisher"] == pytest.approx(expected.item(), rel=0.01)


def test_held_out_samples_do_not_affect_the_tensors(captured):
    changed = CapturedStream(captured.x.clone(), captured.g.clone(), captured.held_out)
    changed.x[6:8] = 5 * changed.x[6:8] + 1
    changed.g[6:8] = changed.g[6:8].flip(0)
    first, second = (
        calibrate_stream(c, SPEC, dataclasses.replace(SETTINGS, hybrid="off")) for c in (captured, changed)
    )
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1]["chosen"] != second[1]["chosen"]


def test_more_bits_lower_the_error(captured):
    errors = []
    for bits in (1, 2, 4):
        spec = TemporalKV(bits=bits).calibration(SHAPE).keys
        errors.append(calibrate_stream(captured, spec, SETTINGS)[1]["chosen"]["plain"])
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]


def test_errors_are_measured_with_centroids_in_their_stored_dtype(captured):
    tensors, measured = calibrate_stream(captured, SPEC, dataclasses.replace(SETTINGS, dtype=torch.bfloat16))
    assert (
        tensors["centroids.temporal" if "centroids.temporal" in tensors else "centroids.channel"].dtype
        is torch.bfloat16
    )
    fisher, _ = errors_by_codec(tensors, captured, TemporalKV())
    assert measured["chosen"]["fisher"] == pytest.approx(fisher, rel=0.01)
