"""How alike layer inputs, keys and values are from layer to layer: what XQuant-CL lives on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kvq_cli.analysis.study import Findings, Show, Study, Subject, register
from kvq_cli.analysis.watching import watch_inputs
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.errors import UsageError

KINDS = {"x": "X", "k": "keys", "v": "values"}


def cosine(above: Tensor, below: Tensor) -> float:
    """Cosine of the angle between two layers' vectors, `[tokens, channels]`: the mean over tokens."""
    return F.cosine_similarity(above.float(), below.float(), dim=-1).mean().item()


def relative_range(above: Tensor, below: Tensor) -> float:
    """Range (max - min over channels) of the difference of two layers over that of the upper one: means over tokens.

    Below 1 a uniform quantizer of the difference has smaller steps than one of the numbers themselves.
    """
    return (_range(above.float() - below.float()) / _range(above.float())).item()


def _range(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=-1)
    return (high - low).mean()


@dataclass
class _Seen:
    """Sums over windows of one kind of numbers."""

    layers: int
    cosines: Tensor = field(init=False)
    ranges: Tensor = field(init=False)
    #: Per layer, the mean of each channel over tokens.
    means: list[Tensor | int] = field(init=False)
    below: Tensor | None = None

    def __post_init__(self) -> None:
        self.cosines, self.ranges = torch.zeros(2, self.layers - 1, dtype=torch.float64)
        self.means = [0] * self.layers

    def add(self, layer: int, x: Tensor) -> None:
        self.means[layer] = self.means[layer] + x.double().mean(0).cpu()
        if layer:
            self.cosines[layer - 1] += cosine(x, self.below)
            self.ranges[layer - 1] += relative_range(x, self.below)
        self.below = x

    def over(self, windows: int) -> dict:
        return {
            "cosine": (self.cosines / windows).tolist(),
            "range": (self.ranges / windows).tolist(),
            "channel_means": [(mean / windows).tolist() for mean in self.means],
        }


@register
@dataclass(frozen=True)
class Similarity(Study):
    """Whether layer inputs X resemble those of the layer below more than keys before RoPE and values do.

    Cosine: of a token's vectors in adjacent layers. Range: of their difference over that of the upper layer's vector.
    """

    name = "similarity"
    source = "XQuant Fig. 3"

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`. One layer's X, keys and values are held at a time, with those of the layer below."""
        sites, windows = attention_layers(subject.loaded.model), subject.windows
        if len(sites) < 2:
            raise UsageError(f"study similarity: {subject.loaded.name} has one layer, and none to compare it with")
        seen = {kind: _Seen(len(sites)) for kind in KINDS}
        for done, tokens in enumerate(windows):
            show("layers", done, len(windows))
            watch_inputs(subject.loaded.model, sites, tokens, lambda layer, kind, x: seen[kind].add(layer, x))
        show("layers", len(windows), len(windows))
        numbers = {kind: one.over(len(windows)) for kind, one in seen.items()}
        columns = ["layers", *(f"{what} {name}" for what in ("cosine", "range") for name in KINDS.values())]
        rows = [
            [f"{layer}, {layer + 1}", *(numbers[kind][what][layer] for what in ("cosine", "range") for kind in KINDS)]
            for layer in range(len(sites) - 1)
        ]
        rows.append(["mean", *(sum(row[i] for row in rows) / len(rows) for i in range(1, len(columns)))])
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (11, 7))


def _draw(figure, numbers: dict) -> None:
    """Above: similarity and range by layer. Below: each channel's mean by layer, where likeness shows as stripes."""
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    labels = (("cosine", "cosine with the layer below"), ("range", "range of the difference, relative"))
    for axis, (what, label) in zip(above.subplots(1, 2), labels, strict=True):
        for kind, name in KINDS.items():
            axis.plot(range(1, 1 + len(numbers[kind][what])), numbers[kind][what], marker="o", markersize=4, label=name)
        axis.set(xlabel="layer", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.axhline(0 if what == "cosine" else 1, color="0.5", linewidth=1, linestyle=":")
        axis.grid(alpha=0.3)
    axis.legend()
    for axis, (kind, name) in zip(below.subplots(1, 3, sharey=True), KINDS.items(), strict=True):
        means = torch.tensor(numbers[kind]["channel_means"])
        # A few channels are far larger than the rest: the 99th percentile is where colours end.
        most = means.abs().flatten().float().quantile(0.99).item()
        image = axis.imshow(means, aspect="auto", cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
        axis.set(title=f"{name}: mean of each channel", xlabel="channel")
        below.colorbar(image, ax=axis, shrink=0.9)
    below.axes[0].set_ylabel("layer")
