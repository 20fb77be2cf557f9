"""Blocks, coresets and channel statistics, each against loops over its definition."""

import itertools

import numpy as np
import pytest
import torch

from kvq_cli.calibration.blocks import draw_coreset, to_blocks
from kvq_cli.calibration.statistics import adjacent_correlation, mean_std, outlier_thresholds
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.methods.specs import BlockShape

SHAPES = [(1, 1, 1), (4, 1, 4), (1, 4, 4), (1, 4, 8), (2, 2, 4), (2, 4, 8), (8, 1, 8)]


@pytest.mark.parametrize(("tokens", "channels", "share"), SHAPES)
def test_blocks_of_a_codebook_are_those_of_its_channels(tokens, channels, share):
    samples, length, heads, head_dim = 2, 16, 3, 8
    x = torch.arange(samples * length * heads * head_dim).view(samples, length, heads, head_dim)
    blocks = to_blocks(x, BlockShape("b", tokens, channels), share)
    assert blocks.shape == (
        heads * head_dim // share,
        x.numel() // heads // (head_dim // share) // (tokens * channels),
        tokens * channels,
    )
    for head, group in itertools.product(range(heads), range(head_dim // share)):
        expected = [
            [x[s, t + j, head, c + i].item() for j in range(tokens) for i in range(channels)]
            for s in range(samples)
            for t in range(0, length, tokens)
            for c in range(group * share, (group + 1) * share, channels)
        ]
        assert blocks[head * (head_dim // share) + group].tolist() == expected


@pytest.mark.parametrize(("tokens", "channels", "share"), SHAPES[1:])
def test_codec_with_every_block_as_a_centroid_is_lossless(tokens, channels, share):
    """The codec and the calibration agree on the layout of a block."""
    x = torch.randn(1, 16, 3, 8, generator=torch.Generator().manual_seed(0))
    blocks = to_blocks(x, BlockShape("b", tokens, channels), share)
    entries = torch.zeros(len(blocks), 256, blocks.shape[2])
    entries[:, : blocks.shape[1]] = blocks
    codec = CodebookCodec(entries.unflatten(0, (3, -1)), (tokens, channels), 8)
    y = x.transpose(1, 2)
    assert torch.allclose(codec.decode(codec.encode(y), torch.float32), y, atol=1e-3)


def test_coreset_weighted_sums_are_unbiased_with_low_variance():
    noise = torch.Generator().manual_seed(0)
    points = torch.randn(2, 5000, 3, generator=noise)
    weights = torch.rand(2, 5000, generator=noise) ** 12  # few points carry most of the weight
    true = torch.stack([weights.sum(-1), (weights[..., None] * points.square()).sum((1, 2))])
    drawn = []
    for seed in range(200):
        p, w = draw_coreset(points, weights, 300, seed)
        assert p.shape == (2, 300, 3) and w.shape == (2, 300)
        drawn.append(torch.stack([w.sum(-1), (w[..., None] * p.square()).sum((1, 2))]))
    drawn = torch.stack(drawn)
    assert torch.allclose(drawn.mean(0), true, rtol=0.01)
    assert (drawn.std(0) < 0.08 * true).all()


def test_coreset_of_all_points_keeps_their_weights():
    points = torch.arange(40.0).view(1, 40, 1)
    weights = torch.rand(1, 40, generator=torch.Generator().manual_seed(0))
    few, drawn = draw_coreset(points, weights, 100, seed=3)
    assert drawn.equal(weights[0, few[0, :, 0].long()][None])
    assert sorted(few.flatten().tolist()) == list(range(40)) != few.flatten().tolist()
    again, _ = draw_coreset(points, weights, 100, seed=4)
    assert not again.equal(few)


def test_coreset_without_weights_is_uniform():
    points, weights = draw_coreset(torch.arange(1000.0).view(1, 1000, 1), torch.zeros(1, 1000), 500, seed=0)
    assert points.unique().numel() > 400 and weights.isfinite().all()


def test_mean_and_std_equal_numpy_over_all_tokens():
    noise = np.random.default_rng(0)
    x = noise.normal(size=(3, 40, 2, 4)) * noise.uniform(0.1, 3, size=(2, 4)) + noise.normal(size=(2, 4)) * 100
    x[..., 1, 2] = 7.0
    mean, std = mean_std(torch.from_numpy(x).float())
    np.testing.assert_allclose(mean.numpy(), x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(std.numpy(), x.std((0, 1)), rtol=1e-3, atol=1e-6)
    assert std[1, 2] == 0


def test_outlier_thresholds_leave_half_of_the_outliers_at_each_end():
    x = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).float().view(5, 200, 1, 1).repeat(1, 1, 2, 3)
    lower, upper = outlier_thresholds(x, 0.01)
    assert lower.shape == upper.shape == (2, 3)
    assert ((x < lower).sum((0, 1)) == 5).all() and ((x > upper).sum((0, 1)) == 5).all()


def test_adjacent_token_correlation():
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4000, 2, 2, generator=noise)
    x[:, 1::2] = 0.6 * x[:, 0::2] + 0.8 * x[:, 1::2]
    x[..., 1, 1] = 3.0  # a constant channel has no correlation
    assert adjacent_correlation(x, *mean_std(x)) == pytest.approx(0.6, abs=0.02)
    assert adjacent_correlation(torch.ones(1, 4, 1, 1), torch.ones(1, 1), torch.zeros(1, 1)) == 0.0
