"""XQuant's latents by channel: whether X U_k has its outliers in the first channel, and B_k predicts those of keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration.factors import factorize
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activation_hooks import watch_inputs
from kvq_cli.papers.studies.activations import spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"x": "X", "k": "X U_k", "v": "X U_v"}
#: How many predicted channels Table B.2 allows.
TOP = (1, 2, 4, 8)
#: How many layers the figure shows, as Figs. B.2 and B.3 do.
DRAWN_LAYERS = 3


def dominance(means: Tensor, channel: int) -> float:
    """A channel's mean magnitude, divided by the mean of all others; `means` `[channels]`."""
    others = (means.sum() - means[channel]) / (len(means) - 1)
    return (means[channel] / others).item()


def magnitude_rank(row: Tensor, channel: int) -> int:
    """The rank of a channel among the magnitudes of `row` `[channels]`; 0 is the largest."""
    return int((row.abs() > row[channel].abs()).sum())


@dataclass
class _Layer:
    """A layer's U_k and U_v, the first row of B_k^T times its singular value, and sums over windows."""

    down: dict[str, Tensor]
    first_row: Tensor
    means: dict[str, Tensor] = field(default_factory=lambda: dict.fromkeys(KINDS, torch.zeros((), dtype=torch.float32)))
    peaks: dict[str, Tensor] = field(default_factory=dict)
    cosine: float = 0.0
    #: Per window, the keys' channel of the largest mean magnitude, and its rank in the first row.
    outliers: list[tuple[int, int]] = field(default_factory=list)

    def add_input(self, x: Tensor) -> None:
        for kind in KINDS:
            latent = x if kind == "x" else x @ self.down[kind]
            self.means[kind] = self.means[kind] + latent.abs().mean(0).cpu()
            peak = latent.abs().amax(0).cpu()
            self.peaks[kind] = torch.maximum(self.peaks.get(kind, peak), peak)
        first = x @ self.down["k"][:, 0]
        self.cosine += (first.abs() / x.norm(dim=-1).clamp_min(1e-30)).mean().item()

    def add_keys(self, keys: Tensor) -> None:
        channel = int(keys.float().abs().mean(0).argmax())
        self.outliers.append((channel, magnitude_rank(self.first_row, channel)))


@register
@dataclass(frozen=True)
class Latents(ModelStudy):
    """X, X U_k and X U_v by channel: whether X U_k has its outliers in channel 0, and B_k predicts those of keys.

    W_k = U_k S B_k^T, W_v likewise. Dominance: the mean magnitude of a channel over that of all others, for the largest
    channel of X and channel 0 of the latents. Cosine: between X and the first direction of U_k, absolute. Place: the
    rank of the keys' outlier channel among the magnitudes of the first row of B_k^T (0: largest), median over windows.
    """

    name = "latents"
    source = "XQuant Figs. B.2, B.3, Table B.2"

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`. Memory: the activations of one layer, and the factors of all weights."""
        sites, windows = attention_layers(data.loaded.model), data.windows
        layers = []
        for place, site in enumerate(sites):
            progress("singular values", place, len(sites))
            factors, _ = factorize(site, ("k", "v"), torch.float32)
            layers.append(_Layer({kind: factors[f"{kind}.down"] for kind in "kv"}, factors["k.up"][0].clone()))
        progress("singular values", len(sites), len(sites))

        def sink(layer: int, kind: str, numbers: Tensor) -> None:
            if kind == "x":
                layers[layer].add_input(numbers.float())
            elif kind == "k":
                layers[layer].add_keys(numbers)

        for index, tokens in enumerate(windows):
            progress("windows", index, len(windows))
            watch_inputs(data.loaded.model, sites, tokens, sink)
        progress("windows", len(windows), len(windows))
        return self._findings(layers, len(windows))

    def _findings(self, layers: list[_Layer], windows: int) -> Findings:
        rows, drawn = [], {}
        for index, layer in enumerate(layers):
            means = {kind: mean / windows for kind, mean in layer.means.items()}
            ratios = [dominance(means["x"], int(means["x"].argmax())), *(dominance(means[k], 0) for k in "kv")]
            ranks = sorted(rank for _, rank in layer.outliers)
            row = [index, *ratios, int(means["k"].argmax()), layer.cosine / windows, ranks[len(ranks) // 2]]
            rows.append(row)
            if index in spread(len(layers), DRAWN_LAYERS):
                drawn[str(index)] = {
                    kind: {"mean": means[kind].tolist(), "peak": layer.peaks[kind].tolist()} for kind in KINDS
                }
        ranks = [rank for layer in layers for _, rank in layer.outliers]
        channels = len(layers[0].first_row)
        numbers: dict[str, Any] = {
            "layers": drawn,
            "dominance": {kind: [row[column] for row in rows] for column, kind in enumerate(KINDS, start=1)},
            "outlier_channels": [[channel for channel, _ in layer.outliers] for layer in layers],
            "places": [[rank for _, rank in layer.outliers] for layer in layers],
            "hits": {str(k): sum(rank < k for rank in ranks) / len(ranks) for k in TOP},
            "by_chance": {str(k): min(1, k / channels) for k in TOP},
        }
        columns = ["layer", "dominance X", "X U_k", "X U_v", "largest of X U_k", "cosine with U_k's first", "place"]
        shares = (f"k={k}: {numbers['hits'][k]:.1%} (by chance {numbers['by_chance'][k]:.1%})" for k in numbers["hits"])
        notes = ["the keys' outlier channel is among the top k of B_k's first row (Table B.2): " + ", ".join(shares)]
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (12, 9.5), notes)


def _draw(figure: Figure, numbers: dict[str, Any]) -> None:
    """Above: magnitudes by channel of some layers. Below: dominance by layer, and how often the prediction is right."""
    above, below = figure.subfigures(2, 1, height_ratios=(3, 1.1), squeeze=False)[:, 0]
    axes = above.subplots(len(numbers["layers"]), 3, squeeze=False)
    for line, (layer, kinds) in zip(axes, numbers["layers"].items(), strict=True):
        for axis, (kind, name) in zip(line, KINDS.items(), strict=True):
            channels = range(len(kinds[kind]["mean"]))
            axis.fill_between(channels, kinds[kind]["peak"], color="C0", alpha=0.3, linewidth=0, label="largest")
            axis.plot(channels, kinds[kind]["mean"], color="C0", linewidth=0.8, label="mean")
            axis.set_title(f"layer {layer}: {name}", fontsize=10)
            axis.set_ylim(bottom=0)
        line[0].set_ylabel("magnitude")
    axes[0][0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("channel")
    ratios, hits = below.subplots(1, 2)
    for kind, which in zip(KINDS, ("largest", "first", "first"), strict=True):
        ratios.plot(numbers["dominance"][kind], marker="o", markersize=4, label=f"{which} channel of {KINDS[kind]}")
    ratios.axhline(1, color="0.5", linewidth=1, linestyle=":")
    ratios.set(xlabel="layer", ylabel="times the others' mean", ylim=(0, None))
    integer_ticks(ratios)
    ratios.legend(fontsize=8)
    for shift, key, label in ((-0.2, "hits", "from B_k alone"), (0.2, "by_chance", "by chance")):
        hits.bar(
            [x + shift for x in range(len(TOP))], [100 * share for share in numbers[key].values()], 0.4, label=label
        )
    hits.set_xticks(range(len(TOP)), [f"k={k}" for k in TOP])
    hits.set(ylabel="keys' outlier channel\nfound, %", ylim=(0, 105))
    hits.legend(fontsize=8, loc="upper left")
