"""The plot of a comparison."""

from __future__ import annotations

import matplotlib.figure
import pytest

from kvq_cli.errors import KvqError
from kvq_cli.evaluation import plot


def method(name: str, bits: int, kl: float) -> dict:
    return {
        "config": {"method": {"name": name, "bits": bits}},
        "cache": {"perplexity-1024": {"measured_bits": bits + 1.0, "tokens": 1024}},
        "results": {"perplexity": {"perplexity,none": 30 + kl, "kl,none": kl}},
    }


def test_style_of_a_method_is_the_same_in_all_panels_and_the_legend(monkeypatch, tmp_path):
    figures: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, *_: figures.append(figure))
    exact = {**method("fp16", 16, 0.0), "config": {"method": {"name": "fp16"}}}  # not in the panel of KL
    found = {"fp16": exact, "kivi-2bit": method("kivi", 2, 0.1), "kivi-4bit": method("kivi", 4, 0.01)}
    plot.plot_comparison({"methods": {**found, "gear-2bit": method("gear", 2, 0.05)}}, tmp_path / "x.png")
    [figure] = figures
    looks = [{line.get_label(): (line.get_color(), line.get_marker()) for line in panel.lines} for panel in figure.axes]
    assert [list(panel) for panel in looks] == [["fp16", "kivi", "gear"], ["kivi", "gear"]]
    legend = {line.get_label(): (line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()}
    assert legend == looks[0] and looks[1].items() <= legend.items() and len(set(legend.values())) == 3


def test_bars_are_standard_errors_and_stay_above_zero(monkeypatch, tmp_path):
    figures: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, *_: figures.append(figure))
    found = {
        "kivi-2bit": method("kivi", 2, 0.1),
        "kivi-4bit": method("kivi", 4, 0.01),
        "gear-2bit": method("gear", 2, 1),
    }
    for label, error in (("kivi-2bit", 0.02), ("kivi-4bit", 0.05)):
        found[label]["results"]["perplexity"]["kl_stderr,none"] = error
    found["kivi-2bit"]["results"]["drift"] = {"kl,none": 0.3, "kl_stderr,none": 0.1}
    plot.plot_comparison({"methods": found}, tmp_path / "x.png")
    perplexity, divergence, drift = figures[0].axes
    assert not perplexity.collections
    [bars] = divergence.collections
    ends = [[tuple(map(float, point)) for point in segment] for segment in bars.get_segments()]
    assert ends == [
        [pytest.approx((3, 0.08)), pytest.approx((3, 0.12))],
        [pytest.approx((5, 0.001)), pytest.approx((5, 0.06))],
    ]
    assert len(drift.lines) == len(drift.collections) == 1


def test_plot_without_perplexity_and_ruler_is_an_error(tmp_path):
    scored = {**method("kivi", 2, 0.1), "results": {"lm_eval:gsm8k": {"exact_match,none": 0.5}}}
    with pytest.raises(KvqError, match="nothing to draw; evaluate --task perplexity, drift or ruler"):
        plot.plot_comparison({"methods": {"kivi-2bit": scored}}, tmp_path / "x.png")


def test_a_small_divergence_is_a_point_and_the_exact_cache_is_none():
    assert plot.divergence(method("klt", 6, 2e-4)) == 2e-4
    assert plot.divergence({**method("fp16", 16, 2e-4), "config": {"method": {"name": "fp16"}}}) is None
