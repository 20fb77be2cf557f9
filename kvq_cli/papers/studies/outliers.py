"""Outlier rates on other texts than the one that the thresholds were calibrated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from kvq_cli.calibration.statistics import outlier_thresholds
from kvq_cli.errors import UsageError
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activations import STREAMS, captured
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: (layer, kind) -> lower and upper threshold.
Thresholds: TypeAlias = dict[tuple[int, str], tuple[Tensor, Tensor]]


def outlier_rate(x: Tensor, lower: Tensor, upper: Tensor) -> float:
    """The share of `x` `[windows, tokens, kv_heads, head_dim]` that lies below `lower` or above `upper`
    `[kv_heads, head_dim]`."""
    beyond = sum(((window < lower) | (window > upper)).sum().item() for window in x)
    return beyond / x.numel()


@register
@dataclass(frozen=True)
class Outliers(ModelStudy):
    """Outlier rates on other texts than the one (--dataset) whose quantiles are the thresholds.

    fraction: the rate on the calibration text, half of it beyond each threshold. others: other texts, comma-separated:
    names as `--dataset` takes them, or files. skip: first tokens of a window to leave out.
    """

    name = "outliers"
    source = "TemporalKV Table 3"
    samples = 16

    fraction: float = 0.01
    others: tuple[str, ...] = ("prose", "pydoc")
    skip: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1 or self.skip < 0 or not all(self.others):
            raise UsageError(
                "study outliers: fraction must be between 0 and 1, skip at least 0, others a list of texts"
            )

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        texts = {f"{data.dataset} (calibration)": data.tokens(data.dataset, "calibration")}
        texts |= {name: data.tokens(name, "evaluation") for name in self.others}
        limits: Thresholds = {}
        rates = {}
        for name, windows in texts.items():
            rates[name] = self._rates(data, windows, limits, _named(progress, name))
        means = {
            name: {stream: sum(by_layer) / len(by_layer) for stream, by_layer in streams.items()}
            for name, streams in rates.items()
        }
        rows = [[name, mean["keys"], mean["values"], sum(mean.values()) / 2] for name, mean in means.items()]
        numbers = {"fraction": self.fraction, "rates": rates}
        return Findings(
            ["text", "keys", "values", "both"],
            rows,
            numbers,
            lambda figure: _draw(figure, numbers),
            (11, 4.5),
            [
                f"Share of numbers beyond the {self.fraction / 2:g} and {1 - self.fraction / 2:g} quantiles of each "
                f"channel in the first text; {data.samples} windows of {data.seqlen} tokens of each text."
            ],
        )

    def _rates(
        self, data: StudyInput, windows: Tensor, limits: Thresholds, progress: Progress
    ) -> dict[str, list[float]]:
        """Rates by stream and layer. limits: the thresholds, which the first text sets."""
        rates: dict[str, list[float]] = {name: [] for name in STREAMS.values()}
        with captured(data.loaded, windows, progress, skip=self.skip) as activations:
            for layer in activations.layers:
                progress("rates", layer, len(activations.layers))
                for kind, name in STREAMS.items():
                    x = activations.x(layer, kind)
                    if (layer, kind) not in limits:
                        limits[layer, kind] = outlier_thresholds(x, self.fraction)
                    rates[name].append(round(outlier_rate(x, *limits[layer, kind]), 6))
            progress("rates", len(activations.layers), len(activations.layers))
        return rates


def _named(progress: Progress, text: str) -> Progress:
    """A progress function that adds the text's name to the phase."""
    return lambda phase, done, total: progress(f"{phase}, {text}", done, total)


def _draw(figure: Figure, numbers: dict) -> None:
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, stream in zip(axes, STREAMS.values(), strict=True):
        for name, streams in numbers["rates"].items():
            axis.plot([100 * rate for rate in streams[stream]], "o-", label=name)
        axis.axhline(100 * numbers["fraction"], color="0.4", linestyle=":", label="target")
        axis.set(title=stream, xlabel="layer")
        integer_ticks(axis)
    axes[0].set(ylabel="outliers, % of all numbers", ylim=(0, None))
    axes[0].legend()
