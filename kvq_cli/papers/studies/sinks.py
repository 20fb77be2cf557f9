"""Fisher weights by token position: how much the loss depends on the first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activations import STREAMS, captured
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fisher_by_position(gradients: Tensor) -> Tensor:
    """Mean squared gradient per number by token position, float64 `[tokens - 1]`; the last token predicts nothing.

    gradients: `[windows, tokens, kv_heads, head_dim]`.
    """
    total = torch.zeros(gradients.shape[1] - 1, dtype=torch.float64, device=gradients.device)
    for window in gradients:
        total += window[:-1].double().square().mean((1, 2))
    return total / len(gradients)


def summary(weights: Tensor, first: int) -> dict[str, float | None]:
    """Statistics of the weights by position `[tokens]`.

    These are token 0, the mean of tokens 1 ... first - 1, the median of all later tokens, the ratio of token 0 to that
    median (None if it is 0), and the share of the first tokens in the sum.
    """
    median = weights[first:].median().item()
    return {
        "token 0": weights[0].item(),
        "other first tokens": weights[1:first].mean().item() if first > 1 else 0.0,
        "median of the rest": median,
        "ratio": weights[0].item() / median if median else None,
        "share": (weights[:first].sum() / weights.sum().clamp_min(1e-300)).item(),
    }


@register
@dataclass(frozen=True)
class Sinks(ModelStudy):
    """Fisher weight by token position: how much larger it is for the first tokens.

    first: how many tokens count as first. layer: the layer that the figure shows (none: the middle one).
    """

    name = "sinks"
    source = "TemporalKV Fig. 18"

    first: int = 8
    layer: int | None = None

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        layers = len(data.loaded.shape.cached_layers)
        drawn = layers // 2 if self.layer is None else self.layer
        if not 0 <= drawn < layers:
            raise UsageError(f"study sinks: layer={drawn}, but the model has {layers} layers with a cache, from 0 on")
        if not 1 <= self.first < data.seqlen - 1:
            longest = data.seqlen - 2
            raise UsageError(f"study sinks: first={self.first} must be at least 1 and, by --seqlen, at most {longest}")
        summaries, curves = [], {}
        with captured(data.loaded, data.windows, progress, gradients=True) as activations:
            for layer in activations.layers:
                progress("Fisher weights", layer, layers)
                weights = {name: fisher_by_position(activations.g(layer, kind)) for kind, name in STREAMS.items()}
                summaries.append({name: summary(of_stream, self.first) for name, of_stream in weights.items()})
                if layer == drawn:
                    curves = {name: [float(f"{w:.4g}") for w in curve.tolist()] for name, curve in weights.items()}
            progress("Fisher weights", layers, layers)
        columns = [
            "layer",
            "numbers",
            "token 0",
            f"tokens 1-{self.first - 1}",
            "median of the rest",
            "token 0 / median",
        ]
        columns.append(f"share of tokens 0-{self.first - 1}")
        rows = [
            [layer, name, *statistics.values()]
            for layer, streams in enumerate(summaries)
            for name, statistics in streams.items()
        ]
        numbers = {"layers": summaries, "drawn": {"layer": drawn, "first": self.first, "fisher_by_position": curves}}
        return Findings(
            columns,
            rows,
            numbers,
            lambda figure: _draw(figure, numbers),
            (11, 4.5),
            [
                f"Squared gradients of the loss of {len(data.windows)} windows of {data.seqlen} tokens, averaged "
                f"over windows, heads and channels."
            ],
        )


def _draw(figure: Figure, numbers: dict) -> None:
    drawn = numbers["drawn"]
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for color, (name, weights) in zip(("tab:red", "tab:blue"), drawn["fisher_by_position"].items(), strict=True):
        left.plot(weights, color=color, linewidth=0.8, label=name)
        left.plot(weights[: drawn["first"]], "o", color=color, markersize=4)
        right.plot([layer[name]["ratio"] for layer in numbers["layers"]], "o-", color=color, label=name)
    # The last tokens, which few predictions depend on, would take up most of a logarithmic axis.
    weights = torch.tensor(list(drawn["fisher_by_position"].values()), dtype=torch.float32)
    low = weights.quantile(0.02).item()
    left.set(title=f"layer {drawn['layer']}", xlabel="token", ylabel="mean squared gradient", yscale="log")
    left.set_ylim(bottom=low / 3 or None)
    left.legend()
    right.axhline(1, color="0.6", linewidth=0.8)
    right.set(title="token 0 over the median of later tokens", xlabel="layer", ylabel="ratio", yscale="log")
    integer_ticks(right)
