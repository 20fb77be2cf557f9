"""Joint entropy of adjacent channels of a token, and of adjacent tokens of a channel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.calibration.statistics import mean_std
from kvq_cli.errors import UsageError
from kvq_cli.papers.studies.activations import STREAMS, Activations, captured, spread
from kvq_cli.papers.studies.study import Findings, Show, Study, Subject, register

_CELLS = 1 << 24  # counted at once
_HISTOGRAMS, _SIDE, _REACH = 3, 32, 3.0  # layers; cells of a side; standard deviations from the middle to the border
_COLORS = {"alone": "goldenrod", "channel": "royalblue", "temporal": "green"}  # the thesis's


def binned(x: Tensor, bins: int) -> Tensor:
    """The bin of each number, int32 `[channels, windows, tokens]` as x: `bins` equally wide ones for each channel, from
    its least number to its largest."""
    x = x.float()
    least, largest = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    width = (largest - least).clamp_min(torch.finfo(torch.float32).tiny)
    return ((x - least) / width * bins).int().clamp_max(bins - 1)


def channel_blocks(x: Tensor, coupled: int) -> Tensor:
    """Blocks of adjacent channels of a token: `[channels, windows, tokens]` -> `[groups, coupled, blocks]`; channels
    that are left over are in none."""
    return x[: len(x) // coupled * coupled].flatten(1).unflatten(0, (-1, coupled))


def token_blocks(x: Tensor, coupled: int) -> Tensor:
    """Blocks of adjacent tokens of a channel: `[channels, windows, tokens]` -> `[channels, coupled, blocks]`. A block
    begins at every token: so there are as many as of channels, and estimates are equally far off."""
    return x.unfold(2, coupled, 1).permute(0, 3, 1, 2).flatten(2)


def joint_entropy(codes: Tensor, bins: int) -> Tensor:
    """H = -sum p log2 p (thesis, 2.4.1) in bits, float64 `[variables]`, with the observed shares for p.

    codes: `[variables, coupled, samples]`, each below `bins`. With few samples it comes out too low: at most
    log2(samples), and by (occupied cells - 1) / (2 samples ln 2) on average where cells have several samples each.
    """
    coupled, samples = codes.shape[1:]
    cells = bins**coupled
    found = []
    for part in codes.split(max(1, _CELLS // max(cells, samples))):
        cell = torch.arange(len(part), device=codes.device)[:, None].expand(-1, samples)
        for place in range(coupled):
            cell = cell * bins + part[:, place]
        counts = torch.bincount(cell.flatten(), minlength=len(part) * cells).view(len(part), cells).double()
        found.append(math.log2(samples) - torch.xlogy(counts, counts).sum(-1) / (samples * math.log(2)))
    return torch.cat(found)


def independent(codes: Tensor, seed: int) -> Tensor:
    """The same blocks, `[variables, coupled, samples]`, with each place shuffled by itself: coupled no longer."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(codes.shape[2], generator=generator).to(codes.device) for _ in range(codes.shape[1])]
    return torch.stack([codes[:, place].index_select(1, order) for place, order in enumerate(orders)], dim=1)


def entropies(codes: Tensor, bins: int, coupled: int, seed: int) -> dict[str, list[float]]:
    """Bits per number of 1 ... coupled coupled ones, averaged over the channels: "channel", "temporal", "independent".

    codes: `[channels, windows, tokens]`. "independent" is what the same estimate makes of the channels' blocks when
    they are shuffled: by as much as it falls when more are coupled, estimates from so many samples are too low, and
    what lies below it is what coupling gains.
    """
    found = {"channel": [], "temporal": [], "independent": []}
    for count in range(1, coupled + 1):
        groups = channel_blocks(codes, count)
        blocks = {"channel": groups, "temporal": token_blocks(codes, count), "independent": independent(groups, seed)}
        for name, one in blocks.items():
            found[name].append(joint_entropy(one, bins).mean().item() / count)
    return found


@register
@dataclass(frozen=True)
class Entropy(Study):
    """Joint entropy per number of coupled channels (ChannelKV) and coupled tokens (TemporalKV), by binning.

    coupled: numbers of a block, at most. bins: of a channel's range. skip: first tokens of a window to leave out.
    """

    name = "entropy"
    source = "TemporalKV Figs. 12-14"
    samples = 64

    coupled: int = 4
    bins: int = 16
    skip: int = 8

    def __post_init__(self) -> None:
        if self.coupled < 2 or self.bins < 2 or self.bins**self.coupled > _CELLS or self.skip < 0:
            raise UsageError(
                f"study entropy: coupled={self.coupled} and bins={self.bins} must be at least 2, bins^coupled at most "
                f"{_CELLS}, skip={self.skip} at least 0"
            )

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        if subject.seqlen - self.skip < self.coupled or subject.loaded.shape.head_dim < self.coupled:
            raise UsageError(
                f"study entropy: coupled={self.coupled} is more than the {subject.seqlen - self.skip} tokens after the "
                f"first of a window, or than head_dim={subject.loaded.shape.head_dim}"
            )
        with captured(subject.loaded, subject.windows, show, skip=self.skip) as activations:
            found = []
            for layer in activations.layers:
                show("entropy", layer, len(activations.layers))
                found.append({name: self._of(activations, layer, kind) for kind, name in STREAMS.items()})
            show("entropy", len(found), len(found))
            pictured = spread(len(found), _HISTOGRAMS)
            histograms = [
                {name: _histograms(activations.x(layer, kind)) for kind, name in STREAMS.items()} for layer in pictured
            ]
        tokens = subject.windows.shape[0] * (subject.windows.shape[1] - self.skip)
        numbers = {
            "tokens": tokens,
            "entropy": found,
            "histograms": {"layers": pictured, "counts": histograms, "reach": _REACH},
        }
        return Findings(*_table(found), numbers, lambda figure: _draw(figure, numbers), (13, 15), self._notes(tokens))

    def _of(self, activations: Activations, layer: int, kind: str) -> dict[str, list[float]]:
        """Head by head: the counting needs several times the memory of the numbers."""
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
            f"Bits per number, from {tokens} tokens, {self.bins} bins of equal width between each channel's least and "
            f"largest number ({self.bins**self.coupled} cells for {self.coupled} coupled numbers).",
            "Few samples for many cells make a joint entropy come out too low. 'independent' is the same estimate of "
            "the same numbers, shuffled: with endless text it would equal 'alone'. What lies below it, coupling gains.",
        ]


def _by_channel(x: Tensor) -> Tensor:
    """`[windows, tokens, kv_heads, head_dim]` -> `[kv_heads, head_dim, windows, tokens]`."""
    return x.permute(2, 3, 0, 1).contiguous()


def _histograms(x: Tensor) -> dict[str, list[list[int]]]:
    """Counts of pairs, `[first, second]`, of all channels, each less its mean and divided by its deviation."""
    mean, std = mean_std(x)
    counts = {name: torch.zeros(_SIDE * _SIDE, dtype=torch.int64) for name in ("channel", "temporal")}
    for window in x.split(1):
        u = (window.float() - mean) / torch.where(std > 0, std, 1.0)
        place = ((u + _REACH) / (2 * _REACH) * _SIDE).floor().int()
        for head in _by_channel(place):
            for name, cut in (("channel", channel_blocks), ("temporal", token_blocks)):
                first, second = cut(head, 2).unbind(1)
                inside = (first >= 0) & (first < _SIDE) & (second >= 0) & (second < _SIDE)
                counts[name] += torch.bincount((first * _SIDE + second)[inside], minlength=_SIDE * _SIDE).cpu()
    return {name: one.view(_SIDE, _SIDE).tolist() for name, one in counts.items()}


def _table(found: list[dict]) -> tuple[list[str], list[list]]:
    columns = ["layer", "numbers", "alone", "independent", "channel", "temporal", "lower"]
    rows = []
    for layer, streams in enumerate(found):
        for name, one in streams.items():
            last = {key: values[-1] for key, values in one.items()}
            lower = min("channel", "temporal", key=last.get)
            joint = [last[key] for key in ("independent", "channel", "temporal")]
            rows.append([layer, name, one["channel"][0], *joint, lower])
    return columns, rows


def _draw(figure, numbers: dict) -> None:
    above, middle, below = figure.subfigures(3, 1, height_ratios=(1, 1.15, 0.8))
    _draw_histograms(above, numbers["histograms"])
    _draw_coupled(middle, numbers["entropy"])
    _draw_layers(below, numbers["entropy"])


def _draw_histograms(figure, histograms: dict) -> None:
    """Fig. 12."""
    layers, reach = histograms["layers"], histograms["reach"]
    axes = figure.subplots(2, 2 * len(layers), sharex=True, sharey=True, squeeze=False)
    columns = [(name, place) for name in STREAMS.values() for place in range(len(layers))]
    for column, (name, place) in enumerate(columns):
        for row, kind in enumerate(("temporal", "channel")):
            counts = torch.tensor(histograms["counts"][place][name][kind]).T
            axes[row][column].imshow(counts, origin="lower", extent=(-reach, reach, -reach, reach), cmap="viridis")
        axes[0][column].set_title(f"{name}, layer {layers[place]}")
    axes[0][0].set_ylabel("temporal\nnext token")
    axes[1][0].set_ylabel("channel\nnext channel")
    figure.supxlabel("number, in standard deviations of its channel", fontsize="medium")


def _draw_coupled(figure, found: list[dict]) -> None:
    """Fig. 13."""
    layers = spread(len(found), 4)
    axes = figure.subplots(2, len(layers), sharex=True, squeeze=False)
    for row, name in enumerate(STREAMS.values()):
        for column, layer in enumerate(layers):
            axis, one = axes[row][column], found[layer][name]
            counts = range(1, len(one["channel"]) + 1)
            axis.axhline(one["channel"][0], color=_COLORS["alone"], label="alone (KVQuant)")
            for kind, method in (("channel", "ChannelKV"), ("temporal", "TemporalKV")):
                axis.plot(counts, one[kind], "o-", color=_COLORS[kind], label=f"{kind} ({method})")
            axis.plot(counts, one["independent"], ":", color="0.4", label="independent (shuffled)")
            axis.set_title(f"{name}, layer {layer}")
            axis.set_xticks(counts)
    axes[0][0].legend(fontsize="x-small")
    figure.supxlabel("coupled numbers", fontsize="medium")
    figure.supylabel("bits per number", fontsize="medium")


def _draw_layers(figure, found: list[dict]) -> None:
    """Fig. 14."""
    axes = figure.subplots(1, 2, sharex=True)
    for axis, name in zip(axes, STREAMS.values(), strict=True):
        streams = [one[name] for one in found]
        axis.plot([one["channel"][0] for one in streams], "o-", color=_COLORS["alone"], label="alone")
        for kind in ("channel", "temporal"):
            coupled = len(streams[0][kind])
            label = f"{coupled} coupled, {kind}"
            axis.plot([one[kind][-1] for one in streams], "o-", color=_COLORS[kind], label=label)
        axis.plot([one["independent"][-1] for one in streams], ":", color="0.4", label="independent (shuffled)")
        axis.set(title=name, xlabel="layer", ylabel="bits per number")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize="small")
