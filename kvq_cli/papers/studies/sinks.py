"""Fisher weights by the token's position: how much the loss depends on the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.papers.studies.activations import STREAMS, captured
from kvq_cli.papers.studies.study import Findings, Show, Study, Subject, register


def fisher_by_position(gradients: Tensor) -> Tensor:
    """Mean squared gradient of a number of each token but the last, from which nothing is predicted.

    gradients: `[windows, tokens, kv_heads, head_dim]`. Float64 `[tokens - 1]`.
    """
    total = torch.zeros(gradients.shape[1] - 1, dtype=torch.float64, device=gradients.device)
    for window in gradients:
        total += window[:-1].double().square().mean((1, 2))
    return total / len(gradients)


def summary(weights: Tensor, first: int) -> dict[str, float | None]:
    """Of the weights by position `[tokens]`: that of token 0, the mean of tokens 1 ... first - 1, the median of the
    others, how many times as much as that token 0 has (None: of nothing), and the first tokens' share of all weight."""
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
class Sinks(Study):
    """Fisher weight by position: how far the first tokens stand out.

    first: how many tokens count as first ones. layer: which one is drawn; none: the middle one.
    """

    name = "sinks"
    source = "TemporalKV Fig. 18"

    first: int = 8
    layer: int | None = None

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        layers = subject.loaded.shape.layers
        drawn = layers // 2 if self.layer is None else self.layer
        if not 0 <= drawn < layers:
            raise UsageError(f"study sinks: layer={drawn}, but the model has {layers} layers, from 0 on")
        if not 1 <= self.first < subject.seqlen - 1:
            most = subject.seqlen - 2
            raise UsageError(f"study sinks: first={self.first} must be at least 1 and, by --seqlen, at most {most}")
        found, curves = [], {}
        with captured(subject.loaded, subject.windows, show, gradients=True) as activations:
            for layer in activations.layers:
                show("Fisher weights", layer, layers)
                weights = {name: fisher_by_position(activations.g(layer, kind)) for kind, name in STREAMS.items()}
                found.append({name: summary(one, self.first) for name, one in weights.items()})
                if layer == drawn:
                    curves = {name: [float(f"{w:.4g}") for w in one.tolist()] for name, one in weights.items()}
            show("Fisher weights", layers, layers)
        columns = [
            "layer",
            "numbers",
            "token 0",
            f"tokens 1-{self.first - 1}",
            "median of the rest",
            "token 0 / median",
        ]
        columns.append(f"share of tokens 0-{self.first - 1}")
        rows = [[layer, name, *one.values()] for layer, streams in enumerate(found) for name, one in streams.items()]
        numbers = {"layers": found, "drawn": {"layer": drawn, "first": self.first, "fisher_by_position": curves}}
        return Findings(
            columns,
            rows,
            numbers,
            lambda figure: _draw(figure, numbers),
            (11, 4.5),
            [
                f"Squared gradients of the loss of {len(subject.windows)} windows of {subject.seqlen} tokens, averaged "
                f"over windows, heads and channels."
            ],
        )


def _draw(figure, numbers: dict) -> None:
    drawn = numbers["drawn"]
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for color, (name, weights) in zip(("tab:red", "tab:blue"), drawn["fisher_by_position"].items(), strict=True):
        left.plot(weights, color=color, linewidth=0.8, label=name)
        left.plot(weights[: drawn["first"]], "o", color=color, markersize=4)
        right.plot([one[name]["ratio"] for one in numbers["layers"]], "o-", color=color, label=name)
    # The last tokens, which few predictions depend on, would take most of a logarithmic axis.
    usual = torch.tensor(list(drawn["fisher_by_position"].values())).quantile(0.02).item()
    left.set(title=f"layer {drawn['layer']}", xlabel="token", ylabel="mean squared gradient", yscale="log")
    left.set_ylim(bottom=usual / 3 or None)
    left.legend()
    right.axhline(1, color="0.6", linewidth=0.8)
    right.set(title="token 0 against median of the rest", xlabel="layer", ylabel="times as much", yscale="log")
    right.xaxis.get_major_locator().set_params(integer=True)
