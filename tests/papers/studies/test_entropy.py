"""Entropies of known distributions, and of the built-in model's keys and values."""

import json
import math

import pytest
import torch

from kvq_cli.papers.studies.entropy import binned, channel_blocks, entropies, independent, joint_entropy, token_blocks


def test_entropy_of_known_distributions():
    four = torch.tensor([0, 1, 2, 3] * 4)
    coin = torch.tensor([0] * 4 + [1] * 12)
    other = torch.arange(16) // 4
    assert joint_entropy(torch.stack([four, coin, torch.zeros_like(four)])[:, None], 4).tolist() == pytest.approx(
        [2, -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75), 0]
    )
    pairs = torch.stack([torch.stack([four, four]), torch.stack([four, other])])
    assert joint_entropy(pairs, 4).tolist() == pytest.approx([2, 4])  # one says the other; neither does


def test_bins_of_a_channel_span_its_minimum_to_its_maximum():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [-1.0, -0.9, 0.0, 0.9, 1.0], [7.0] * 5])[:, None]
    assert binned(x, 4)[:, 0].tolist() == [[0, 1, 2, 3, 3], [0, 0, 2, 3, 3], [0] * 5]


def test_blocks_are_of_adjacent_channels_or_of_adjacent_tokens():
    x = torch.arange(3 * 2 * 4).view(3, 2, 4)  # channels, windows, tokens
    assert channel_blocks(x, 2).tolist() == [[list(range(8)), list(range(8, 16))]]  # the third channel is left over
    blocks = token_blocks(x, 3)
    assert blocks.shape == (3, 3, 4)  # no block has tokens of two windows
    assert blocks[1].T.tolist() == [[8, 9, 10], [9, 10, 11], [12, 13, 14], [13, 14, 15]]


def test_the_gain_of_coupling_gaussians_is_their_mutual_information():
    correlation = 0.8
    noise = torch.randn(4, 8, 20_000, generator=torch.Generator().manual_seed(0))
    x = noise.clone()
    for token in range(1, x.shape[2]):
        x[..., token] = correlation * x[..., token - 1] + math.sqrt(1 - correlation**2) * noise[..., token]
    found = entropies(binned(x, 16), 16, 2, seed=0)
    information = -0.5 * math.log2(1 - correlation**2)
    assert found["independent"][1] - found["temporal"][1] == pytest.approx(information / 2, abs=0.03)
    assert found["independent"][1] == pytest.approx(found["channel"][1], abs=2e-3)  # the channels are independent
    assert found["channel"][0] == found["temporal"][0] == found["independent"][0]


def test_shuffled_numbers_show_the_bias_of_few_samples():
    codes = torch.randint(0, 16, (8, 1, 500), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = entropies(codes, 16, 4, seed=0)
    assert found["channel"][0] == pytest.approx(4, abs=0.05)
    assert found["channel"][3] <= math.log2(500) / 4 < 2.5  # 4 in truth: all of it is bias
    assert found["independent"][3] == pytest.approx(found["channel"][3], abs=0.02)


def test_shuffling_keeps_the_numbers_of_each_position():
    codes = torch.randint(0, 9, (3, 2, 50), generator=torch.Generator().manual_seed(0))
    apart = independent(codes, seed=1)
    assert torch.equal(apart.sort(-1).values, codes.sort(-1).values)
    assert not torch.equal(apart, codes)


def test_the_command_gives_every_layer(kvq, tmp_path):
    result = kvq(
        "analyze", "entropy", "--samples", 2, "--seqlen", 72, "--set", "coupled=2", "--out", tmp_path, "--json"
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "entropy.json").read_text())
    assert [row[:2] for row in document["rows"]] == [[n, kind] for n in range(8) for kind in ("keys", "values")]
    numbers = document["numbers"]
    assert numbers["tokens"] == 2 * (72 - 8)
    assert all(0 < value < 4 for row in document["rows"] for value in row[2:6])
    counts = torch.tensor(numbers["histograms"]["counts"][0]["keys"]["channel"])
    assert 0.9 * 2 * 32 * 128 < counts.sum() <= 2 * 32 * 128  # pairs of 2 heads, 32 of a head, of 128 tokens
    assert (tmp_path / "entropy.png").stat().st_size > 20_000


@pytest.mark.parametrize("option", ["coupled=1", "bins=1", "bins=4096", "skip=-1"])
def test_invalid_options_are_refused(fails, option):
    fails("analyze", "entropy", "--set", option, code=2, says="study entropy")
