"""Similarity between layers, of known vectors and of the built-in model's."""

import json

import pytest
import torch

from kvq_cli.papers.studies.similarity import KINDS, Similarity, cosine, relative_range


def test_cosine_of_known_vectors():
    x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert cosine(x, 2 * x) == pytest.approx(1)
    assert cosine(x, torch.tensor([[4.0, -3.0], [-1.0, 0.0]])) == pytest.approx(-0.5)


def test_range_of_a_difference_over_the_range_of_the_layer():
    above = torch.tensor([[0.0, 10.0, 5.0], [0.0, 2.0, -8.0]])
    below = torch.tensor([[1.0, 10.0, 5.0], [0.0, -1.0, -8.0]])
    assert relative_range(above, below) == pytest.approx((1 + 3) / (10 + 10))
    assert relative_range(above, torch.zeros(2, 3)) == pytest.approx(1)
    assert relative_range(above, above + 7) == pytest.approx(0)  # a constant costs a zero-point, no range


def test_the_command_compares_all_adjacent_layers(kvq, tmp_path):
    result = kvq("analyze", "similarity", "--samples", 2, "--seqlen", 48, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "similarity.json").read_text())
    assert [row[0] for row in document["rows"]] == [f"{layer}, {layer + 1}" for layer in range(7)] + ["mean"]
    for kind, channels in zip(KINDS, (256, 128, 128), strict=True):
        found = document["numbers"][kind]
        assert len(found["channel_means"]) == 8 and {len(row) for row in found["channel_means"]} == {channels}
        assert all(-1 <= value <= 1 for value in found["cosine"]) and all(value > 0 for value in found["range"])
    assert (tmp_path / "similarity.png").stat().st_size > 5000


def test_results_are_means_over_windows(study_input):
    windows = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
    single = [Similarity().run(study_input("tiny", one[None]), lambda *_: None).numbers for one in windows]
    together = Similarity().run(study_input("tiny", windows), lambda *_: None).numbers
    for kind in KINDS:
        for what in ("cosine", "range", "channel_means"):
            mean = torch.tensor([one[kind][what] for one in single]).mean(0)
            torch.testing.assert_close(torch.tensor(together[kind][what]), mean)
