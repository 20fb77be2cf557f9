"""Fisher weights by position."""

import json

import pytest
import torch

from kvq_cli.papers.studies.sinks import fisher_by_position, summary


def test_weights_are_mean_squares_over_windows_heads_and_channels():
    window = torch.tensor([[[1.0, 3.0]], [[2.0, 0.0]], [[7.0, 7.0]]])  # tokens, kv_heads, head_dim
    gradients = torch.stack([window, 3 * window])
    assert fisher_by_position(gradients).tolist() == pytest.approx([5 * (1 + 9) / 2, 2 * (1 + 9) / 2])


def test_summary_of_known_weights():
    weights = torch.tensor([100.0, 10.0, 20.0, 1.0, 2.0, 3.0])
    found = summary(weights, first=3)
    assert found == pytest.approx(
        {"token 0": 100, "other first tokens": 15, "median of the rest": 2, "ratio": 50, "share": 130 / 136}
    )
    assert summary(torch.tensor([1.0, 0.0, 0.0]), first=1)["ratio"] is None


def test_the_command_draws_a_layer_and_summarizes_all(kvq, tmp_path):
    words = ["--samples", 2, "--seqlen", 40, "--set", "first=4", "--set", "layer=6"]
    assert kvq("analyze", "sinks", *words, "--out", tmp_path, "--quiet").exit_code == 0
    document = json.loads((tmp_path / "sinks.json").read_text(), parse_constant=pytest.fail)
    drawn = document["numbers"]["drawn"]
    assert drawn["layer"] == 6
    for name, weights in drawn["fisher_by_position"].items():
        assert len(weights) == 39 and min(weights) >= 0
        row = next(row for row in document["rows"] if row[:2] == [6, name])
        assert row[2] == pytest.approx(weights[0], rel=1e-3)
        assert row[-1] == pytest.approx(sum(weights[:4]) / sum(weights), rel=1e-2)
    assert len(document["rows"]) == 16
    assert (tmp_path / "sinks.png").stat().st_size > 10_000


@pytest.mark.parametrize("option", ["first=0", "first=39", "layer=8", "layer=-1"])
def test_unknown_layers_and_invalid_counts_are_refused(fails, option):
    fails("analyze", "sinks", "--samples", 1, "--seqlen", 40, "--set", option, code=2, says="study sinks")
