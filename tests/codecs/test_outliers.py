"""Outliers in 16 bits: selection, bytes, and the error they save."""

import pytest
import torch

from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

HEADS, HEAD_DIM = 2, 64


def heavy_tailed(tokens=96, seed=0, dtype=torch.float16):
    x = torch.randn(2, HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return (x**3).to(dtype)


def thresholds(x, fraction=0.01):
    flat = x.float().transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)
    return flat.quantile(fraction / 2, 0), flat.quantile(1 - fraction / 2, 0)


def uniform(bits=2):
    return UniformCodec(bits, "channel", 32, HEAD_DIM)


def temporal():
    """Codebooks of numbers like those of `heavy_tailed`, without its outliers."""
    points = torch.randn(HEADS, HEAD_DIM // 4, 256, 4, generator=torch.Generator().manual_seed(9)) ** 3
    return CodebookCodec(points.clamp(-10, 10), (4, 1), HEAD_DIM)


def test_all_numbers_as_outliers_decode_exactly():
    x = heavy_tailed()
    codec = OutlierCodec(uniform(), *thresholds(x), 1.0, x.dtype)
    assert torch.equal(codec.decode(codec.encode(x), x.dtype), x)


@pytest.mark.parametrize("base", [uniform, temporal])
def test_furthest_numbers_are_kept_up_to_the_capacity(base):
    x = heavy_tailed()
    lower, upper = thresholds(x, 0.05)  # five times more outliers than places
    codec = OutlierCodec(base(), lower, upper, 0.01, x.dtype)
    packed = codec.encode(x)
    decoded = codec.decode(packed, x.dtype)
    assert codec.capacity <= 0.01 * 32 * HEAD_DIM < codec.capacity + 1

    wide = (upper - lower)[:, None].double()
    excess = torch.maximum(x.double() - upper[:, None], lower[:, None] - x.double()) / wide
    excess = excess.unflatten(2, (-1, 32)).flatten(3)  # [B, H, blocks, numbers]
    kept = packed.parts["outlier_index"].tensor.long()
    assert kept.shape == (2, HEADS, 3, codec.capacity)
    for row, places in zip(excess.flatten(0, 2), kept.flatten(0, 2), strict=True):
        assert len(set(places.tolist())) == codec.capacity
        assert row[places].min() >= row.topk(codec.capacity).values.min() - 1e-6
    blocks = (decoded.unflatten(2, (-1, 32)).flatten(3), x.unflatten(2, (-1, 32)).flatten(3))
    assert torch.equal(blocks[0].gather(3, kept), blocks[1].gather(3, kept))


def test_bytes_are_the_codes_and_four_per_outlier():
    x = heavy_tailed()
    codec = OutlierCodec(temporal(), *thresholds(x), 0.01, x.dtype)
    blocks = 2 * HEADS * x.shape[2] // 32
    assert codec.encode(x).nbytes == temporal().encode(x).nbytes + blocks * codec.capacity * 4
    assert codec.nominal_bits == 2


@pytest.mark.parametrize(("base", "group"), [(uniform, 32), (temporal, 4)])
def test_outliers_lower_the_error_of_their_neighbours(base, group):
    x = heavy_tailed(seed=3)
    lower, upper = thresholds(x)
    codec = OutlierCodec(base(), lower, upper, 0.01, x.dtype)
    outside = (x.float() < lower[:, None]) | (x.float() > upper[:, None])
    beside = outside.unflatten(2, (-1, group)).any(3).repeat_interleave(group, 2) & ~outside

    def error(c):
        return (c.decode(c.encode(x), torch.float32) - x.float())[beside].square().mean()

    assert error(codec) < 0.9 * error(base())


def test_first_of_equal_numbers_is_kept():
    x = torch.zeros(1, HEADS, 32, HEAD_DIM)
    x[0, :, 5:25] = 7.0
    codec = OutlierCodec(uniform(), -torch.ones(HEADS, HEAD_DIM), torch.ones(HEADS, HEAD_DIM), 0.01, x.dtype)
    kept = codec.encode(x).parts["outlier_index"].tensor
    assert kept[0, 0, 0].tolist() == list(range(5 * HEAD_DIM, 5 * HEAD_DIM + codec.capacity))


def test_equal_thresholds_give_no_nan():
    x = heavy_tailed()
    flat = torch.zeros(HEADS, HEAD_DIM)
    codec = OutlierCodec(uniform(8), flat, flat, 0.01, x.dtype)
    assert codec.decode(codec.encode(x), torch.float32).isfinite().all()


def test_fraction_without_outliers_is_refused():
    with pytest.raises(UsageError, match=r"outliers=1e-05.*at least"):
        OutlierCodec(uniform(), torch.zeros(HEADS, HEAD_DIM), torch.ones(HEADS, HEAD_DIM), 1e-5, torch.float16)


@pytest.mark.parametrize("channel", [False, True])
def test_codes_are_those_nearest_to_the_other_numbers_of_their_block(channel):
    """Brute force in float64: outliers are overwritten, so their distance does not count."""
    x = heavy_tailed(64)
    points = torch.randn(HEADS, HEAD_DIM // 4, 256, 4, generator=torch.Generator().manual_seed(9)).half()
    base = CodebookCodec(points, (1, 4) if channel else (4, 1), HEAD_DIM)
    codec = OutlierCodec(base, *thresholds(x, 0.05), 0.05, x.dtype)
    packed = codec.encode(x)
    outlier = torch.zeros(2, HEADS, 2, 32 * HEAD_DIM, dtype=torch.bool)
    outlier.scatter_(3, packed.parts["outlier_index"].tensor.long(), True)
    outlier = outlier.view(x.shape)

    def blocks(y):  # [B, H, T / l, D / c, l * c]
        if channel:
            return y.unflatten(3, (-1, 4))
        return y.unflatten(2, (-1, 4)).transpose(3, 4)

    book = torch.arange(HEAD_DIM // (4 if channel else 1)) // (1 if channel else 4)
    distances = (blocks(x.double()).unsqueeze(-2) - points.double()[:, None, book]).square()
    distances = distances.masked_fill(blocks(outlier).unsqueeze(-2), 0).sum(-1)
    chosen = distances.gather(-1, packed.parts["codes"].tensor.long().unsqueeze(-1)).squeeze(-1)
    assert blocks(outlier).any(-1).float().mean() > 0.1
    torch.testing.assert_close(chosen, distances.amin(-1), rtol=1e-3, atol=1e-3)
