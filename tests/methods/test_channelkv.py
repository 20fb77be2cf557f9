"""ChannelKV against its equations in float64, on random and real keys and values; cost, refusals."""

import dataclasses

import pytest
import torch

from kvq_cli.calibration.captured import ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.specs import BlockShape, CodebookSpec
from kvq_cli.methods.window import Window


def plan_for(method, shape, tensors_for):
    return method.plan(0, shape, tensors_for(method.calibration(shape), shape, [0] * shape.kv_heads))


def numbers(shape, tokens=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, shape.kv_heads, tokens, shape.head_dim, generator=generator).to(shape.torch_dtype)


def assert_nearest_chunks(codec, x, centroids):
    """The nearest of 256 centroids for each chunk of c channels, by distances in float64."""
    heads, groups, entries, size = centroids.shape
    assert (entries, groups * size) == (256, x.shape[3])
    decoded = codec.decode(codec.encode(x), torch.float64)
    for h in range(heads):
        for group in range(groups):
            channels = slice(group * size, (group + 1) * size)
            chunks, own = (t[:, h, :, channels].reshape(-1, size).double() for t in (x, decoded))
            distance = torch.cdist(chunks, centroids[h, group].double()).min(1).values
            assert torch.isin(own, centroids[h, group].double()).all()
            torch.testing.assert_close((chunks - own).norm(dim=1), distance, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("bits", "chunk"), [(1, 8), (2, 4), (4, 2)])
def test_chunks_windows_and_cost(bits, chunk, shape, tensors_for):
    method = build("channelkv", bits=bits)
    tensors, x = tensors_for(method.calibration(shape), shape, [0, 0]), numbers(shape)
    plan = method.plan(0, shape, tensors)
    assert (plan.keys.source, plan.values.source) == ("pre_rope", "value")
    for kind, stream in (("k", plan.keys), ("v", plan.values)):
        assert stream.window == Window(8, 0, 1)
        assert stream.codec.nominal_bits == bits
        assert stream.codec.encode(x).nbytes * 8 == bits * x.numel()
        assert tensors[f"{kind}.centroids.channel"].shape == (2, 64 // chunk, 256, chunk)
        assert_nearest_chunks(stream.codec, x, tensors[f"{kind}.centroids.channel"])


@pytest.mark.parametrize("bits", [1, 4])
def test_real_keys_and_values_equal_the_equations(bits, captured, calibrated):
    plan, tensors = calibrated(build("channelkv", bits=bits))
    for kind, stream in (("k", plan.keys), ("v", plan.values)):
        assert_nearest_chunks(stream.codec, captured[kind].x[:1].transpose(1, 2), tensors[f"{kind}.centroids.channel"])


def test_codebooks_are_neither_normalized_nor_shared(shape):
    spec = build("channelkv", bits=1, sinks=4, fisher=False).calibration(shape)
    assert (spec.skip, spec.fisher, spec.hybrid) == (4, False, "off")
    assert spec.keys == spec.values == CodebookSpec((BlockShape("channel", 1, 8),), 256, 8, False)


@pytest.mark.parametrize(("bits", "chunk"), [(2, 8), (4, 4)])
def test_codes_of_sixteen_bits(bits, chunk, shape, tensors_for):
    method = build("channelkv", bits=bits, entries=65536)
    tensors, x = tensors_for(method.calibration(shape), shape, [0, 0]), numbers(shape, tokens=24)
    stream = method.plan(0, shape, tensors).keys
    packed = stream.codec.encode(x)
    assert stream.codec.nominal_bits == bits and packed.nbytes * 8 == bits * x.numel()
    centroids = tensors["k.centroids.channel"]
    assert centroids.shape == (1, 1, 65536, chunk)  # of all channels and heads
    mean, std = (tensors[f"k.{name}"].double().unsqueeze(1) for name in ("mean", "std"))
    chunks = ((x.double() - mean) / std).reshape(-1, chunk)
    decoded = ((stream.codec.decode(packed, torch.float64) - mean) / std).reshape(-1, chunk)
    distance = torch.cat([torch.cdist(part, centroids[0, 0].double()).amin(1) for part in chunks.split(256)])
    # Distances on a grid of 2^-13 of the codebook's extent.
    torch.testing.assert_close((chunks - decoded).norm(dim=1), distance, rtol=0, atol=3e-3)
    codes = packed.parts["codes"].tensor
    assert codes.dtype == torch.int16 and codes.min() < 0  # all 16 bits are used


def test_codebook_bytes_of_llama_3_1_8b_match_table_13(shape_of, tensors_for):
    """The thesis's Table 13 counts TemporalKV's codebooks, which have the size of ChannelKV's: 33.6 MB."""
    plan = plan_for(build("channelkv"), shape_of(32, 8, 128), tensors_for)
    held = [stream.codec.constants()["centroids"] for stream in (plan.keys, plan.values)]
    assert round(32 * sum(c.numel() * c.element_size() for c in held) / 1e6, 1) == 33.6


@pytest.mark.slow
def test_chunks_of_one_channel_equal_chunks_of_one_token(captured):
    """With chunks of 1, ChannelKV and TemporalKV are both a codebook of 256 points per channel."""
    settings = ClusterSettings(fisher=True, hybrid="off", points=1 << 20, iterations=10, seed=0, dtype=torch.float32)
    x = captured["v"].x[:1].transpose(1, 2)
    small = dataclasses.replace(captured["v"], x=captured["v"].x[..., :2], g=captured["v"].g[..., :2])
    decoded = []
    for name in ("channel", "temporal"):
        tensors, _ = calibrate_stream(small, CodebookSpec((BlockShape(name, 1, 1),), 256, 1, False), settings)
        books = tensors[f"centroids.{name}"]
        codec = CodebookCodec(books, (1, 1), 2)
        decoded.append(codec.decode(codec.encode(x[..., :2]), torch.float32))
    assert torch.equal(*decoded)
    points = books.squeeze(3).double()  # [heads, channels, 256]
    nearest = (x[..., :2, None].double() - points[None, :, None]).abs().amin(-1)
    torch.testing.assert_close((decoded[0] - x[..., :2]).abs().double(), nearest, rtol=0, atol=1e-4)


def test_outliers_are_kept_in_sixteen_bits(shape, tensors_for):
    plan = plan_for(build("channelkv", outliers=0.01), shape, tensors_for)
    x = numbers(shape)
    for stream in (plan.keys, plan.values):
        assert stream.window == Window(8, 0, 32)
        assert 2.3 < stream.codec.encode(x).nbytes * 8 / x.numel() <= 2.32


def test_outliers_and_bits_lower_the_error(held_out_error):
    def error(kind, weighted=True, **options):
        return held_out_error(build("channelkv", **options), kind, weighted=weighted)

    for kind in "kv":
        assert error(kind, bits=1) > error(kind, bits=2) > error(kind, bits=4)
        # With 4 bits: for longer chunks the captured numbers are few, and outliers make them fewer.
        assert error(kind, False, bits=4, outliers=0.01) < 0.9 * error(kind, False, bits=4)


def test_invalid_options_are_refused(shape, shape_of, tensors_for):
    with pytest.raises(UsageError, match=r"channelkv: bits=3 is not one of 1, 2, 4 \(an 8-bit code stands for 8, 4 or"):
        build("channelkv", bits=3)
    with pytest.raises(UsageError, match=r"bits=1 are chunks of 8 channels, .* head_dim=84; use bits=2 or 4"):
        build("channelkv", bits=1).calibration(shape_of(head_dim=84))
    with pytest.raises(UsageError, match="channelkv: bits=1 with entries=65536 are chunks of 16 .*: use bits=2 or 4"):
        build("channelkv", bits=1, entries=65536).calibration(shape)
    with pytest.raises(UsageError, match="entries=65536 leaves no outliers: set outliers=0, or entries=256"):
        build("channelkv", outliers=0.01, entries=65536).calibration(shape)
    with pytest.raises(UsageError, match="rotation=opq has no codebooks of entries=65536: set rotation=hadamard or"):
        build("channelkv", rotation="opq", entries=65536).calibration(shape)
    method = build("channelkv")
    with pytest.raises(UsageError, match="channelkv needs an artifact: run `kvq calibrate --method channelkv`"):
        method.plan(0, shape, {})
    tensors = tensors_for(method.calibration(shape), shape, [0, 0])
    with pytest.raises(KvqError, match=r"no tensor layers.0.k.centroids.channel"):
        method.plan(0, shape, {"k.choice": tensors["k.choice"]})


def test_equal_buffers_keep_the_same_tokens_exact_for_all_codebook_methods(shape, tensors_for):
    """Without a buffer the block decides: one token, a chunk, or an outlier block."""
    windows, own = set(), set()
    for name in ("channelkv", "temporalkv", "kvquant"):
        for outliers in (0.0, 0.01):
            own.add(plan_for(build(name, bits=2, outliers=outliers), shape, tensors_for).keys.window.flush)
            plan = plan_for(build(name, bits=2, outliers=outliers, buffer=32), shape, tensors_for)
            windows |= {plan.keys.window, plan.values.window}
    assert windows == {Window(8, 0, 32)} and own == {1, 4, 32}
