"""Similarity of layer inputs, keys and values between adjacent layers, which XQuant-CL exploits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.errors import UsageError
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activation_hooks import watch_inputs
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"x": "X", "k": "keys", "v": "values"}


def cosine(above: Tensor, below: Tensor) -> float:
    """Cosine similarity of two layers' vectors `[tokens, channels]`, averaged over tokens."""
    return F.cosine_similarity(above.float(), below.float(), dim=-1).mean().item()


def relative_range(above: Tensor, below: Tensor) -> float:
    """Mean range (max - min over channels) of the difference of two layers, divided by that of the upper layer.

    Below 1, a uniform quantizer of the difference has smaller steps than one of the upper layer itself.
    """
    return (_range(above.float() - below.float()) / _range(above.float())).item()


def _range(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=-1)
    return (high - low).mean()


@dataclass
class _Sums:
    """Sums over windows for X, keys or values."""

    layers: int
    cosines: Tensor = field(init=False)
    ranges: Tensor = field(init=False)
    #: Per layer, each channel's mean over tokens.
    means: list[Tensor] = field(init=False)
    #: The layer below in the current window.
    below: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cosines, self.ranges = torch.zeros(2, self.layers - 1, dtype=torch.float64)
        self.means = [torch.zeros((), dtype=torch.float32)] * self.layers

    def add(self, layer: int, x: Tensor) -> None:
        self.means[layer] = self.means[layer] + x.double().mean(0).cpu()
        if layer:
            self.cosines[layer - 1] += cosine(x, self.below)
            self.ranges[layer - 1] += relative_range(x, self.below)
        self.below = x

    def means_over(self, windows: int) -> dict[str, Any]:
        return {
            "cosine": (self.cosines / windows).tolist(),
            "range": (self.ranges / windows).tolist(),
            "channel_means": [(mean / windows).tolist() for mean in self.means],
        }


@register
@dataclass(frozen=True)
class Similarity(ModelStudy):
    """Similarity of layer inputs X between adjacent layers, compared with that of keys (before RoPE) and values.

    Cosine: of a token's vectors in adjacent layers. Range: of their difference over that of the upper layer's vector.
    """

    name = "similarity"
    source = "XQuant Fig. 3"

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`. Memory: X, keys and values of two adjacent layers."""
        sites, windows = attention_layers(data.loaded.model), data.windows
        if len(sites) < 2:
            raise UsageError(
                f"study similarity: {data.loaded.name} has a single layer: choose a model with at least two"
            )
        sums = {kind: _Sums(len(sites)) for kind in KINDS}
        for index, tokens in enumerate(windows):
            progress("layers", index, len(windows))
            watch_inputs(data.loaded.model, sites, tokens, lambda layer, kind, x: sums[kind].add(layer, x))
        progress("layers", len(windows), len(windows))
        numbers = {kind: of_kind.means_over(len(windows)) for kind, of_kind in sums.items()}
        columns = ["layers", *(f"{measure} {name}" for measure in ("cosine", "range") for name in KINDS.values())]
        rows = [
            [f"{layer}, {layer + 1}", *(numbers[kind][key][layer] for key in ("cosine", "range") for kind in KINDS)]
            for layer in range(len(sites) - 1)
        ]
        rows.append(["mean", *(sum(row[i] for row in rows) / len(rows) for i in range(1, len(columns)))])
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (11, 7))


def _draw(figure: Figure, numbers: dict[str, Any]) -> None:
    """Above: cosine and range by layer. Below: each channel's mean by layer; similar layers show as stripes."""
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1), squeeze=False)[:, 0]
    labels = (("cosine", "cosine with the layer below"), ("range", "range of the difference, relative"))
    for axis, (key, label) in zip(above.subplots(1, 2), labels, strict=True):
        for kind, name in KINDS.items():
            axis.plot(range(1, 1 + len(numbers[kind][key])), numbers[kind][key], marker="o", markersize=4, label=name)
        axis.set(xlabel="layer", ylabel=label)
        integer_ticks(axis)
        axis.axhline(0 if key == "cosine" else 1, color="0.5", linewidth=1, linestyle=":")
        axis.grid(alpha=0.3)
    axis.legend()
    for axis, (kind, name) in zip(below.subplots(1, 3, sharey=True), KINDS.items(), strict=True):
        means = torch.tensor(numbers[kind]["channel_means"], dtype=torch.float32)
        # A few channels are far larger than the others: the color scale ends at the 99th percentile.
        limit = means.abs().flatten().quantile(0.99).item()
        image = axis.imshow(means, aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
        axis.set(title=f"{name}: mean of each channel", xlabel="channel")
        below.colorbar(image, ax=axis, shrink=0.9)
    below.axes[0].set_ylabel("layer")
