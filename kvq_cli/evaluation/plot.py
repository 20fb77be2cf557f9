"""Plot the scores of compared methods over their measured bits per cached number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import DRIFT, PERPLEXITY
from kvq_cli.evaluation.ruler.tasks import RULER
from kvq_cli.evaluation.tabulate import EXACT, longest_cache
from kvq_cli.figures import new_figure, save

MARKERS = "osD^vP*X<>hpd"
TICKS = (1, 2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class Panel:
    """One plot of the figure. score: the value of a method's result document, None if it has none; error: its standard
    error, None if it has none, or one of texts that differ far more than methods do (perplexity)."""

    label: str
    score: Callable[[Mapping[str, Any]], float | None]
    error: Callable[[Mapping[str, Any]], float | None] = lambda result: None
    log: bool = True

    def bar(self, result: Mapping[str, Any]) -> tuple[float, float] | None:
        """The ends of a bar of one standard error to each side, above zero on a logarithmic axis."""
        score, error = self.score(result), self.error(result)
        if score is None or error is None:
            return None
        return max(score - error, score / 10) if self.log else score - error, score + error


def plot_comparison(
    document: Mapping[str, Any], path: Path, only: Sequence[Panel] | None = None, *, bold: str | None = None
) -> None:
    """Plot perplexity, KL divergence, that of drift, and mean RULER score, as far as evaluated, over measured bits per
    number, with standard errors.

    document: a comparison as `kvq eval --compare` writes it. only: draw these panels; None: `PANELS`. A line joins
    results that differ in bits alone. bold: draw lines of this method thick and black. KvqError if there is nothing to
    draw.
    """
    methods = document["methods"]
    lines = {name: [methods[label] for label in labels] for name, labels in lines_by_method(methods).items()}
    shown = PANELS if only is None else only
    panels = [panel for panel in shown if any(panel.score(result) is not None for result in methods.values())]
    if not panels:
        raise KvqError(f"--plot {path}: nothing to draw; evaluate --task perplexity, drift or ruler")
    figure = new_figure(1 + 5 * len(panels), 5.5)
    from matplotlib.lines import Line2D

    axes = figure.subplots(1, len(panels), squeeze=False)
    # A method has the same color and marker in all panels, also if one of the panels lacks some methods.
    styles = {name: _style(number, name.split(",")[0] == bold) for number, name in enumerate(lines)}
    drawn: set[str] = set()
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, results in lines.items():
            scores = [(measured_bits(result), panel.score(result)) for result in results]
            if points := sorted((bits, score) for bits, score in scores if score is not None):
                axis.plot(*zip(*points, strict=True), label=name, **styles[name])
                drawn.add(name)
            bars = [(measured_bits(result), bar) for result in results if (bar := panel.bar(result)) is not None]
            if bars:
                places, ends = zip(*bars, strict=True)
                axis.vlines(places, *zip(*ends, strict=True), color=styles[name]["color"], lw=1, alpha=0.6)
        axis.set_ylabel(panel.label)
        axis.set_xlabel("measured bits per cached number")
        axis.set_xscale("log", base=2)
        limits = axis.get_xlim()
        axis.set_xticks(TICKS, [f"{tick}" for tick in TICKS])
        axis.set_xlim(limits)  # ticks outside of the data would widen the axis
        axis.grid(alpha=0.3)
        if panel.log:
            axis.set_yscale("log")
    handles = [Line2D([], [], label=name, **style) for name, style in styles.items() if name in drawn]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(5, 1 + 2 * len(panels)), fontsize=8, frameon=False
    )
    save(figure, path, "--plot")


def _style(number: int, bold: bool) -> dict[str, Any]:
    """Color, marker and width of the numbered line: the ten dark colors of tab20, then its ten light ones."""
    from matplotlib import colormaps

    color = colormaps["tab20"](2 * (number % 10) + number // 10 % 2)
    style = {"color": color, "marker": MARKERS[number % len(MARKERS)], "markersize": 5, "lw": 1}
    return style | {"color": "black", "markersize": 7, "lw": 2.5, "zorder": 3} if bold else style


def lines_by_method(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Labels of the result documents that differ in bits alone, by label without bits: the points of each line."""
    lines: dict[str, list[str]] = {}
    for label, result in methods.items():
        bits = result["config"]["method"].get("bits")
        suffix = "" if bits is None else f"-{bits:g}bit"
        lines.setdefault(label.replace(suffix, "", 1), []).append(label)
    return lines


def measured_bits(result: Mapping[str, Any]) -> float:
    """Measured bits as tables print them: of the task with the longest samples."""
    return longest_cache(result)["measured_bits"]


def _perplexity(result: Mapping[str, Any]) -> float | None:
    metrics = result["results"].get(PERPLEXITY)
    return metrics["perplexity,none"] if metrics else None


def divergence(result: Mapping[str, Any]) -> float | None:
    """KL divergence to the uncompressed model; None for fp16: its rounding error would dominate a logarithmic axis."""
    metrics = result["results"].get(PERPLEXITY)
    if not metrics or result["config"]["method"]["name"] == EXACT or metrics["kl,none"] <= 0:
        return None
    return metrics["kl,none"]


def _divergence_error(result: Mapping[str, Any]) -> float | None:
    return result["results"].get(PERPLEXITY, {}).get("kl_stderr,none")


def _drift(result: Mapping[str, Any]) -> float | None:
    metrics = result["results"].get(DRIFT)
    exact = result["config"]["method"]["name"] == EXACT
    return None if exact or not metrics or metrics["kl,none"] <= 0 else metrics["kl,none"]


def _drift_error(result: Mapping[str, Any]) -> float | None:
    return result["results"].get(DRIFT, {}).get("kl_stderr,none")


def ruler_mean(result: Mapping[str, Any]) -> float | None:
    """Mean score of RULER's tasks in percent, over all lengths; None without them."""
    lengths = {key.removesuffix(",none"): value for key, value in result["results"].get(RULER, {}).items()}
    scores = [value for length, value in lengths.items() if length.isdecimal()]
    return 100 * sum(scores) / len(scores) if scores else None


DIVERGENCE = Panel("KL divergence to the uncompressed model", divergence, _divergence_error)
PANELS = (
    Panel("perplexity", _perplexity),
    DIVERGENCE,
    Panel("KL divergence over long answers (drift)", _drift, _drift_error),
    Panel("RULER, mean of the tasks (%)", ruler_mean, log=False),
)
