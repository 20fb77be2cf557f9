"""Outlier rates with thresholds of another text."""

import json
import math

import pytest
import torch

from kvq_cli.calibration.statistics import outlier_thresholds
from kvq_cli.papers.studies.outliers import outlier_rate


def test_rate_of_known_numbers():
    x = torch.arange(12.0).view(2, 3, 1, 2)
    assert outlier_rate(x, torch.tensor([[2.0, 1.0]]), torch.tensor([[9.0, 8.0]])) == pytest.approx(4 / 12)


def test_numbers_of_larger_variance_have_more_outliers():
    x = torch.randn(8, 4000, 2, 3, generator=torch.Generator().manual_seed(0))
    limits = outlier_thresholds(x, 0.01)
    assert outlier_rate(x, *limits) == pytest.approx(0.01, rel=0.01)
    beyond = math.erfc(2.5758 / 2 / math.sqrt(2))  # of numbers twice as wide, by the quantiles of a Gaussian
    assert outlier_rate(2 * x, *limits) == pytest.approx(beyond, rel=0.02)


def test_the_command_measures_each_text_by_the_thresholds_of_the_first(kvq, tmp_path):
    strange = tmp_path / "strange.txt"
    strange.write_text("0101 1100 xq zx;; " * 400)
    words = ["--samples", 4, "--seqlen", 64, "--set", f"others=prose,{strange}", "--set", "fraction=0.04"]
    result = kvq("analyze", "outliers", *words, "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "outliers.json").read_text())
    names = ["prose (calibration)", "prose", str(strange)]
    assert [row[0] for row in document["rows"]] == names
    both = dict(zip(names, (row[3] for row in document["rows"]), strict=True))
    assert 0.5 * 0.04 < both["prose (calibration)"] <= 0.045 < both[str(strange)]
    assert all(len(one["keys"]) == len(one["values"]) == 8 for one in document["numbers"]["rates"].values())
    assert (tmp_path / "outliers.png").stat().st_size > 10_000


@pytest.mark.parametrize("option", ["fraction=0", "fraction=1", "skip=-1", "others="])
def test_invalid_options_are_refused(fails, option):
    fails("analyze", "outliers", "--set", option, code=2, says="study outliers")
