"""Joint entropy of adjacent channels of a token, and of adjacent tokens of a channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.calibration.statistics import mean_std
from kvq_cli.errors import UsageError
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activations import STREAMS, Activations, captured, spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure, FigureBase

_MAX_CELLS = 1 << 24  # histogram cells counted at once
_HISTOGRAM_LAYERS, _SIDE, _REACH = 3, 32, 3.0  # drawn layers; bins per axis; standard deviations to each border
_COLORS = {"alone": "goldenrod", "channel": "royalblue", "temporal": "green"}  # the thesis's


def binned(x: Tensor, bins: int) -> Tensor:
    """The bin index of each number, int32 `[channels, windows, tokens]` like x: per channel, `bins` bins of equal width
    from its minimum to its maximum."""
    x = x.float()
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    width = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    return ((x - low) / width * bins).int().clamp_max(bins - 1)


def channel_blocks(x: Tensor, coupled: int) -> Tensor:
    """Blocks of adjacent channels of a token: `[channels, windows, tokens]` -> `[groups, coupled, blocks]`. Channels
    that do not fill a group are dropped."""
    return x[: len(x) // coupled * coupled].flatten(1).unflatten(0, (-1, coupled))


def token_blocks(x: Tensor, coupled: int) -> Tensor:
    """Blocks of adjacent tokens of a channel: `[channels, windows, tokens]` -> `[channels, coupled, blocks]`. Blocks
    overlap, one per first token, so that their number and thus the estimate's bias match those of channel blocks."""
    return x.unfold(2, coupled, 1).permute(0, 3, 1, 2).flatten(2)


def joint_entropy(codes: Tensor, bins: int) -> Tensor:
    """H = -sum p log2 p (thesis, 2.4.1) in bits, float64 `[variables]`, with observed frequencies as p.

    codes: `[variables, coupled, samples]`, each below `bins`. The estimate is biased low for few samples: it is at most
    log2(samples), and low by (occupied cells - 1) / (2 samples ln 2) on average if cells have several samples each.
    """
    coupled, samples = codes.shape[1:]
    cells = bins**coupled
    parts = []
    for part in codes.split(max(1, _MAX_CELLS // max(cells, samples))):
        cell = torch.arange(len(part), device=codes.device)[:, None].expand(-1, samples)
        for position in range(coupled):
            cell = cell * bins + part[:, position]
        counts = torch.bincount(cell.flatten(), minlength=len(part) * cells).view(len(part), cells).double()
        parts.append(math.log2(samples) - torch.xlogy(counts, counts).sum(-1) / (samples * math.log(2)))
    return torch.cat(parts)


def independent(codes: Tensor, seed: int) -> Tensor:
    """The blocks `[variables, coupled, samples]` with each position shuffled separately: numbers become independent."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(codes.shape[2], generator=generator).to(codes.device) for _ in range(codes.shape[1])]
    return torch.stack([codes[:, position].index_select(1, order) for position, order in enumerate(orders)], dim=1)


def entropies(codes: Tensor, bins: int, coupled: int, seed: int) -> dict[str, list[float]]:
    """Joint entropy per number, in bits, of 1 ... `coupled` coupled numbers, averaged over channels, by kind of block:
    "channel", "temporal", "independent".

    codes: `[channels, windows, tokens]`. "independent" is the same estimate for shuffled channel blocks. It shows the
    bias of estimates from so many samples: an entropy below it is a gain from coupling.
    """
    entropy: dict[str, list[float]] = {"channel": [], "temporal": [], "independent": []}
    for count in range(1, coupled + 1):
        groups = channel_blocks(codes, count)
        blocks = {"channel": groups, "temporal": token_blocks(codes, count), "independent": independent(groups, seed)}
        for name, block in blocks.items():
            entropy[name].append(joint_entropy(block, bins).mean().item() / count)
    return entropy


@register
@dataclass(frozen=True)
class Entropy(ModelStudy):
    """Joint entropy per number of coupled channels (ChannelKV) and coupled tokens (TemporalKV), by binning.

    coupled: the largest block. bins: bins of a channel's range. skip: first tokens of a window to leave out.
    """

    name = "entropy"
    source = "TemporalKV Figs. 12-14"
    samples = 64

    coupled: int = 4
    bins: int = 16
    skip: int = 8

    def __post_init__(self) -> None:
        if self.coupled < 2 or self.bins < 2 or self.bins**self.coupled > _MAX_CELLS or self.skip < 0:
            raise UsageError(
                f"study entropy: coupled={self.coupled} and bins={self.bins} must be at least 2, bins^coupled at most "
                f"{_MAX_CELLS}, skip={self.skip} at least 0"
            )

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        if data.seqlen - self.skip < self.coupled or data.loaded.shape.head_dim < self.coupled:
            raise UsageError(
                f"study entropy: coupled={self.coupled} is more than the {data.seqlen - self.skip} tokens after the "
                f"first of a window, or than head_dim={data.loaded.shape.head_dim}"
            )
        with captured(data.loaded, data.windows, progress, skip=self.skip) as activations:
            layers = []
            for layer in activations.layers:
                progress("entropy", layer, len(activations.layers))
                layers.append({name: self._entropies(activations, layer, kind) for kind, name in STREAMS.items()})
            progress("entropy", len(layers), len(layers))
            drawn = spread(len(layers), _HISTOGRAM_LAYERS)
            histograms = [
                {name: _histograms(activations.x(layer, kind)) for kind, name in STREAMS.items()} for layer in drawn
            ]
        tokens = data.windows.shape[0] * (data.windows.shape[1] - self.skip)
        numbers = {
            "tokens": tokens,
            "entropy": layers,
            "histograms": {"layers": drawn, "counts": histograms, "reach": _REACH},
        }
        return Findings(*_table(layers), numbers, lambda figure: _draw(figure, numbers), (13, 15), self._notes(tokens))

    def _entropies(self, activations: Activations, layer: int, kind: str) -> dict[str, list[float]]:
        """`entropies`, averaged over heads; one head at a time, as counting takes several times its memory."""
        heads = [
            entropies(binned(head, self.bins), self.bins, self.coupled, seed=index)
            for index, head in enumerate(_by_channel(activations.x(layer, kind)))
        ]
        return {
            name: [round(sum(values) / len(heads), 5) for values in zip(*(head[name] for head in heads), strict=True)]
            for name in heads[0]
        }

    def _notes(self, tokens: int) -> list[str]:
        return [
            f"Bits per number, from {tokens} tokens, with {self.bins} bins of equal width between each channel's "
            f"minimum and maximum ({self.bins**self.coupled} cells for {self.coupled} coupled numbers).",
            "With few samples per cell a joint entropy is underestimated. 'independent' is the same estimate for the "
            "same numbers, shuffled; with unlimited text it would equal 'alone'. Coupling gains what lies below it.",
        ]


def _by_channel(x: Tensor) -> Tensor:
    """`[windows, tokens, kv_heads, head_dim]` -> `[kv_heads, head_dim, windows, tokens]`."""
    return x.permute(2, 3, 0, 1).contiguous()


def _histograms(x: Tensor) -> dict[str, list[list[int]]]:
    """Counts `[first, second]` of pairs of adjacent numbers, normalized per channel, summed over all channels."""
    mean, std = mean_std(x)
    counts = {name: torch.zeros(_SIDE * _SIDE, dtype=torch.int64) for name in ("channel", "temporal")}
    for window in x.split(1):
        u = (window.float() - mean) / torch.where(std > 0, std, 1.0)
        bins = ((u + _REACH) / (2 * _REACH) * _SIDE).floor().int()
        for head in _by_channel(bins):
            for name, cut in (("channel", channel_blocks), ("temporal", token_blocks)):
                first, second = cut(head, 2).unbind(1)
                inside = (first >= 0) & (first < _SIDE) & (second >= 0) & (second < _SIDE)
                counts[name] += torch.bincount((first * _SIDE + second)[inside], minlength=_SIDE * _SIDE).cpu()
    return {name: count.view(_SIDE, _SIDE).tolist() for name, count in counts.items()}


def _table(layers: list[dict]) -> tuple[list[str], list[list]]:
    columns = ["layer", "numbers", "alone", "independent", "channel", "temporal", "lower"]
    rows = []
    for layer, streams in enumerate(layers):
        for name, entropy in streams.items():
            last = {key: values[-1] for key, values in entropy.items()}
            lower = "temporal" if last["temporal"] < last["channel"] else "channel"
            joint = [last[key] for key in ("independent", "channel", "temporal")]
            rows.append([layer, name, entropy["channel"][0], *joint, lower])
    return columns, rows


def _draw(figure: Figure, numbers: dict) -> None:
    above, middle, below = figure.subfigures(3, 1, height_ratios=(1, 1.15, 0.8), squeeze=False)[:, 0]
    _draw_histograms(above, numbers["histograms"])
    _draw_coupled(middle, numbers["entropy"])
    _draw_layers(below, numbers["entropy"])


def _draw_histograms(figure: FigureBase, histograms: dict) -> None:
    """Fig. 12."""
    layers, reach = histograms["layers"], histograms["reach"]
    axes = figure.subplots(2, 2 * len(layers), sharex=True, sharey=True, squeeze=False)
    columns = [(name, index) for name in STREAMS.values() for index in range(len(layers))]
    for column, (name, index) in enumerate(columns):
        for row, kind in enumerate(("temporal", "channel")):
            counts = torch.tensor(histograms["counts"][index][name][kind]).T
            axes[row][column].imshow(counts, origin="lower", extent=(-reach, reach, -reach, reach), cmap="viridis")
        axes[0][column].set_title(f"{name}, layer {layers[index]}")
    axes[0][0].set_ylabel("temporal\nnext token")
    axes[1][0].set_ylabel("channel\nnext channel")
    figure.supxlabel("number, in standard deviations of its channel", fontsize="medium")


def _draw_coupled(figure: FigureBase, layers: list[dict]) -> None:
    """Fig. 13."""
    drawn = spread(len(layers), 4)
    axes = figure.subplots(2, len(drawn), sharex=True, squeeze=False)
    for row, name in enumerate(STREAMS.values()):
        for column, layer in enumerate(drawn):
            axis, entropy = axes[row][column], layers[layer][name]
            counts = range(1, len(entropy["channel"]) + 1)
            axis.axhline(entropy["channel"][0], color=_COLORS["alone"], label="alone (KVQuant)")
            for kind, method in (("channel", "ChannelKV"), ("temporal", "TemporalKV")):
                axis.plot(counts, entropy[kind], "o-", color=_COLORS[kind], label=f"{kind} ({method})")
            axis.plot(counts, entropy["independent"], ":", color="0.4", label="independent (shuffled)")
            axis.set_title(f"{name}, layer {layer}")
            axis.set_xticks(counts)
    axes[0][0].legend(fontsize="x-small")
    figure.supxlabel("coupled numbers", fontsize="medium")
    figure.supylabel("bits per number", fontsize="medium")


def _draw_layers(figure: FigureBase, layers: list[dict]) -> None:
    """Fig. 14."""
    axes = figure.subplots(1, 2, sharex=True)
    for axis, name in zip(axes, STREAMS.values(), strict=True):
        streams = [layer[name] for layer in layers]
        axis.plot([entropy["channel"][0] for entropy in streams], "o-", color=_COLORS["alone"], label="alone")
        for kind in ("channel", "temporal"):
            coupled = len(streams[0][kind])
            label = f"{coupled} coupled, {kind}"
            axis.plot([entropy[kind][-1] for entropy in streams], "o-", color=_COLORS[kind], label=label)
        axis.plot([entropy["independent"][-1] for entropy in streams], ":", color="0.4", label="independent (shuffled)")
        axis.set(title=name, xlabel="layer", ylabel="bits per number")
        integer_ticks(axis)
    axes[0].legend(fontsize="small")
