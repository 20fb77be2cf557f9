"""The picture of a comparison: what each method's bits buy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.settings import PERPLEXITY, RULER
from kvq_cli.figures import new_figure, save

MARKERS = "osD^vP*X<>hpd"


def plot_comparison(document: Mapping[str, Any], path: Path) -> None:
    """Perplexity, KL divergence and RULER's mean (those that were evaluated) over the measured bits per number.

    document: what `kvq eval --compare` writes. A line joins the settings of one method that differ in bits alone.
    """
    from matplotlib.lines import Line2D

    families = _families(document["methods"])
    panels = [panel for panel in (_perplexity, _divergence, _ruler) if any(panel(one) for one in _all(families))]
    if not panels:
        raise KvqError(f"--plot {path}: nothing to draw; evaluate --task perplexity or ruler")
    figure = new_figure(1 + 5 * len(panels), 5.5)
    axes = figure.subplots(1, len(panels), squeeze=False)
    # A method looks the same in all panels, also where one of them does not show all methods.
    styles = {
        name: {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "markersize": 5, "lw": 1}
        for number, name in enumerate(families)
    }
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in families.items():
            if found := sorted((_bits(one), panel(one)[1]) for one in points if panel(one)):
                axis.plot(*zip(*found, strict=True), label=name, **styles[name])
        axis.set_ylabel(next(panel(one)[0] for one in _all(families) if panel(one)))
        axis.set_xlabel("measured bits per cached number")
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 3, 4, 6, 8, 16], ["1", "2", "3", "4", "6", "8", "16"])
        axis.grid(alpha=0.3)
        if panel is not _ruler:
            axis.set_yscale("log")
    shown = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.legend(handles=shown, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save(figure, path, "--plot")


def _families(methods: Mapping[str, Mapping]) -> dict[str, list[Mapping]]:
    """Methods that differ in nothing but their bits, under one label."""
    found: dict[str, list[Mapping]] = {}
    for label, one in methods.items():
        bits = one["config"]["method"].get("bits")
        found.setdefault(label.replace(f"-{bits}bit", "", 1), []).append(one)
    return found


def _all(families: Mapping[str, list[Mapping]]) -> list[Mapping]:
    return [one for points in families.values() for one in points]


def _bits(one: Mapping) -> float:
    name = next((name for name in one["cache"] if name.startswith(PERPLEXITY)), next(iter(one["cache"])))
    return one["cache"][name]["measured_bits"]


def _perplexity(one: Mapping) -> tuple[str, float] | None:
    found = one["results"].get(PERPLEXITY)
    return found and ("perplexity", found["perplexity,none"])


def _divergence(one: Mapping) -> tuple[str, float] | None:
    found = one["results"].get(PERPLEXITY)
    # An exact cache differs by rounding alone, which says nothing on a logarithmic axis.
    return ("KL divergence to the uncompressed model", found["kl,none"]) if found and found["kl,none"] > 1e-3 else None


def _ruler(one: Mapping) -> tuple[str, float] | None:
    scores = [value for key, value in one["results"].get(RULER, {}).items() if key.endswith(",none")]
    return ("RULER, mean of the tasks (%)", 100 * sum(scores) / len(scores)) if scores else None
