"""How many numbers lie beyond thresholds of another text: the rate of outliers when they are calibrated offline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvq_cli.calibration.statistics import thresholds
from kvq_cli.errors import UsageError
from kvq_cli.papers.studies.activations import STREAMS, captured
from kvq_cli.papers.studies.study import Findings, Show, Study, Subject, register


def outlier_rate(x: Tensor, lower: Tensor, upper: Tensor) -> float:
    """The share of the numbers `[windows, tokens, kv_heads, head_dim]` below `lower` or above `upper`
    `[kv_heads, head_dim]`."""
    beyond = sum(((window < lower) | (window > upper)).sum().item() for window in x)
    return beyond / x.numel()


@register
@dataclass(frozen=True)
class Outliers(Study):
    """Rate of outliers on other texts than the one (--dataset) whose quantiles are the thresholds.

    fraction: outliers by the thresholds on their own text: half of it lies beyond each. others: texts, with commas
    between: names as `--dataset` takes them, or files. skip: first tokens of a window to leave out.
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

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        texts = {f"{subject.dataset} (calibration)": subject.tokens(subject.dataset, "calibration")}
        texts |= {name: subject.tokens(name, "evaluation") for name in self.others}
        limits: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        rates = {}
        for name, windows in texts.items():
            rates[name] = self._rates(subject, windows, limits, _named(show, name))
        means = {name: {side: sum(one) / len(one) for side, one in sides.items()} for name, sides in rates.items()}
        rows = [[name, sides["keys"], sides["values"], sum(sides.values()) / 2] for name, sides in means.items()]
        numbers = {"fraction": self.fraction, "rates": rates}
        return Findings(
            ["text", "keys", "values", "both"],
            rows,
            numbers,
            lambda figure: _draw(figure, numbers),
            (11, 4.5),
            [
                f"Share of numbers beyond the {self.fraction / 2:g} and {1 - self.fraction / 2:g} quantiles of each "
                f"channel in the first text; {subject.samples} windows of {subject.seqlen} tokens of each text."
            ],
        )

    def _rates(self, subject: Subject, windows: Tensor, limits: dict, show: Show) -> dict[str, list[float]]:
        """By stream and layer. limits: filled by the first text."""
        found = {name: [] for name in STREAMS.values()}
        with captured(subject.loaded, windows, show, skip=self.skip) as activations:
            for layer in activations.layers:
                show("rates", layer, len(activations.layers))
                for kind, name in STREAMS.items():
                    x = activations.x(layer, kind)
                    if (layer, kind) not in limits:
                        limits[layer, kind] = thresholds(x, self.fraction)
                    found[name].append(round(outlier_rate(x, *limits[layer, kind]), 6))
            show("rates", len(activations.layers), len(activations.layers))
        return found


def _named(show: Show, text: str) -> Show:
    """A progress bar of its own for each text."""
    return lambda phase, done, total: show(f"{phase}, {text}", done, total)


def _draw(figure, numbers: dict) -> None:
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, side in zip(axes, STREAMS.values(), strict=True):
        for name, sides in numbers["rates"].items():
            axis.plot([100 * rate for rate in sides[side]], "o-", label=name)
        axis.axhline(100 * numbers["fraction"], color="0.4", linestyle=":", label="meant")
        axis.set(title=side, xlabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(ylabel="outliers, % of all numbers", ylim=(0, None))
    axes[0].legend()
