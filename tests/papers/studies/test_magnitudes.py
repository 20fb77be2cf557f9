"""Variance of magnitudes that channels and tokens explain, before and after RoPE."""

import json

import pytest
import torch

from kvq_cli.papers.studies.magnitudes import shares


def test_shares_of_known_magnitudes():
    along = torch.tensor([1.0, 5.0, 2.0])
    assert shares(along.expand(4, 3)) == pytest.approx((1, 0))  # each channel has its own
    assert shares(along[:, None].expand(3, 4)) == pytest.approx((0, 1))  # each token has
    assert shares(torch.tensor([[1.0, 2.0], [2.0, 1.0]])) == pytest.approx((0, 0))
    assert shares(torch.tensor([[0.0, 1.0], [2.0, 3.0]])) == pytest.approx((0.2, 0.8))
    assert shares(torch.ones(3, 3)) == (0, 0)


def test_rope_rotates_pairs_of_channels_and_keeps_their_norm(kvq, tmp_path):
    words = ["--samples", 1, "--seqlen", 40, "--set", "layers=2", "--set", "tokens=20", "--set", "skip=3"]
    assert kvq("analyze", "magnitudes", *words, "--out", tmp_path, "--quiet").exit_code == 0
    document = json.loads((tmp_path / "magnitudes.json").read_text())
    drawn = document["numbers"]["drawn"]
    assert drawn["layers"] == [0, 7] and drawn["first_token"] == 3
    for sides in drawn["magnitudes"]:
        before, after = (torch.tensor(sides[f"keys {side} RoPE"]) for side in ("before", "after"))
        assert before.shape == after.shape == (64, 20)
        lengths = [keys[:32].square() + keys[32:].square() for keys in (before, after)]
        torch.testing.assert_close(*lengths, rtol=0.03, atol=0.01)  # numbers of three digits
        assert (before - after).abs().max() > 0.5
    assert len(document["rows"]) == 8 * 3
    assert all(0 <= share <= 1 for row in document["rows"] for share in row[2:])
    assert (tmp_path / "magnitudes.png").stat().st_size > 20_000


def test_an_unknown_head_is_refused(fails):
    fails("analyze", "magnitudes", "--set", "head=2", code=2, says="2 kv heads")
