"""Ranks, klt's line at equal measured bits, and the pages of drift."""

from __future__ import annotations

import json

import pytest

from kvq_cli.evaluation.drift import PARTS
from lab.pages import drift
from lab.pages.ranking import Row, over_klt, ranked


def row(label, bits, kl, windows=()):
    results = {"kl,none": kl, "perplexity,none": 9.0, "top1,none": 0.9}
    document = {
        "results": {"perplexity": results},
        "higher_is_better": {"perplexity": {"perplexity": False, "kl": False, "top1": True}},
        "config": {"method": {"name": label.partition("-")[0]}},
        "cache": {"perplexity": {"nominal_bits": 2, "measured_bits": bits, "bytes": 1, "ratio": 1, "tokens": 9}},
    }
    return Row(label, document, windows)


def test_ranks_follow_from_paired_intervals():
    """Two methods that differ alike in all windows are ranked; one that is better in some of them is not."""
    lower, higher, mixed = ([0.1, 0.2, 0.3], [0.2, 0.31, 0.4], [0.05, 0.9, 0.1])
    rows = [row(*each) for each in (("kivi-2bit", 4, 0.2, lower), ("b", 4, 0.3, higher), ("c", 4, 0.35, mixed))]
    assert [line[1] for line in ranked(rows, rows)] == ["1-2", "2-3", "1-3"]
    assert [line[4].endswith("*") for line in ranked(rows, rows)] == [False, True, False]
    assert ranked([row("d", 4, 1.0)], rows)[0][1] == ""


@pytest.mark.parametrize(
    ("bits", "kl", "shown"),
    [
        (3.0, 0.08, "4.0"),  # at klt's own bits
        (3.5, 0.08, "8.0"),  # halfway between .02 and .005 in ln KL: .01
        (4.0, 0.01, "> 2.0"),
        (6.0, 0.01, "> 2.0"),
        (2.0, 0.01, "< 0.5"),
    ],
)
def test_a_methods_kl_is_set_beside_klts_at_equal_measured_bits(bits, kl, shown):
    curve = [row("klt-2bit", 3.0, 0.02), row("klt-3bit", 4.0, 0.005)]
    assert over_klt(row("kivi-2bit", bits, kl), curve) == shown
    assert over_klt(curve[0], curve) == "" and over_klt(row("kivi-2bit", bits, kl), []) == ""


@pytest.fixture
def root(tmp_path):
    """Answers of two methods: `grows`' last eighth is worse in all, `varies`' in one of three."""
    folder = tmp_path / "smollm2" / "drift"
    folder.mkdir(parents=True)
    scores = {"grows": ([0.1, 0.2, 0.3], [0.2, 0.31, 0.4]), "varies": ([0.1, 0.2, 0.3], [0.9, 0.1, 0.2])}
    methods = {}
    for label, (first, last) in scores.items():
        parts = {f"kl_{part + 1},none": 0.5 for part in range(PARTS)}
        means = {
            "kl,none": 0.5,
            "kl_stderr,none": 0.1,
            "top1,none": 0.9,
            "agreement,none": 7,
            "agreement_stderr,none": 1,
        }
        methods[label] = {
            "results": {"drift": parts | means},
            "n-samples": {"drift": {"effective": 3}},
            "cache": {"drift": {"measured_bits": 3.0, "tokens": 2559.0}},
        }
        scores[label] = {"drift-2560 KL first eighth": first, "drift-2560 KL last eighth": last}
    (folder / "comparison.json").write_text(json.dumps({"methods": methods}))
    (folder / "scores.json").write_text(json.dumps(scores))
    return tmp_path


def test_growth_of_the_same_answers_has_a_star_beyond_chance(root):
    page = drift.pages(root)[drift.PAGE]
    assert "3 texts of 2,560 tokens" in page and "| grows | 3.00 | 0.5000 ±0.1000 |" in page
    assert "| 1.52 * | 90.0 % | 7 ±1 |" in page and "| 2.00 | 90.0 % |" in page
    assert drift.summary(root).endswith("- SmolLM2-135M: KL grows beyond chance for grows.")


def test_without_results_there_is_no_page_of_drift(tmp_path):
    assert drift.pages(tmp_path) == {} and drift.summary(tmp_path) == ""
