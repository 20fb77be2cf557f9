"""Magnitudes of keys (before and after RoPE) and values by channel and token, and how much of them channels explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.papers.studies.activations import Activations, captured, spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = ("keys before RoPE", "keys after RoPE", "values")


def shares(magnitudes: Tensor) -> tuple[float, float]:
    """The shares of the variance of magnitudes `[tokens, channels]` that channels and that tokens explain.

    These are the variances of the channels' means and of the tokens' means over the total one: together at most 1.
    """
    x = magnitudes.double()
    total = x.var(correction=0).clamp_min(1e-300)
    channels, tokens = ((x.mean(dim).var(correction=0) / total).item() for dim in (0, 1))
    return channels, tokens


@register
@dataclass(frozen=True)
class Magnitudes(ModelStudy):
    """Magnitudes by channel and token: keys before and after RoPE, and values.

    layers, tokens: how many the figure shows. head: the kv head whose channels it shows. skip: first tokens of a window
    to leave out.
    """

    name = "magnitudes"
    source = "TemporalKV Fig. 16"

    layers: int = 3
    head: int = 0
    tokens: int = 96
    skip: int = 8

    def __post_init__(self) -> None:
        if self.layers < 1 or self.tokens < 2 or self.skip < 0 or self.head < 0:
            raise UsageError("study magnitudes: layers must be at least 1, tokens 2, head and skip 0")

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        heads = data.loaded.shape.kv_heads
        if self.head >= heads:
            raise UsageError(f"study magnitudes: head={self.head}, but the model has {heads} kv heads, from 0 on")
        explained, drawn_magnitudes = [], []
        with captured(data.loaded, data.windows, progress, skip=self.skip) as activations:
            drawn = spread(len(activations.layers), self.layers)
            for layer in activations.layers:
                progress("magnitudes", layer, len(activations.layers))
                explained.append(self._explained(activations, layer))
                if layer in drawn:
                    drawn_magnitudes.append(self._drawn(activations, layer))
            progress("magnitudes", len(explained), len(explained))
        rows = [
            [layer, kind, share["channels"], share["tokens"]]
            for layer, kinds in enumerate(explained)
            for kind, share in kinds.items()
        ]
        numbers: dict[str, Any] = {
            "explained": explained,
            "drawn": {"layers": drawn, "head": self.head, "first_token": self.skip, "magnitudes": drawn_magnitudes},
        }
        columns = ["layer", "magnitudes of", "explained by channel", "by token"]
        return Findings(
            columns,
            rows,
            numbers,
            lambda figure: _draw(figure, numbers["drawn"]),
            (13, 1 + 2.6 * len(drawn)),
            [
                f"Share of the variance of |x| within a head that the channels' means and the tokens' means explain, "
                f"averaged over {heads} kv heads and {len(data.windows)} windows: 1 if magnitudes are constant along "
                f"each channel (or within each token)."
            ],
        )

    def _explained(self, activations: Activations, layer: int) -> dict[str, dict[str, float]]:
        by_kind: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        for window in range(len(activations.x(layer, "k"))):
            for kind, numbers in self._numbers(activations, layer, window).items():
                by_kind[kind] += [shares(head.abs()) for head in numbers]
        means = {kind: [sum(part) / len(pairs) for part in zip(*pairs, strict=True)] for kind, pairs in by_kind.items()}
        return {kind: {"channels": round(a, 5), "tokens": round(b, 5)} for kind, (a, b) in means.items()}

    def _drawn(self, activations: Activations, layer: int) -> dict[str, list[list[float]]]:
        """Magnitudes `[channels][tokens]` of the first window, rounded to three digits."""
        return {
            kind: [[float(f"{n:.3g}") for n in row] for row in numbers[self.head, : self.tokens].abs().T.tolist()]
            for kind, numbers in self._numbers(activations, layer, 0).items()
        }

    def _numbers(self, activations: Activations, layer: int, window: int) -> dict[str, Tensor]:
        """By kind: the numbers of a window, float32 `[kv_heads, tokens, head_dim]`."""
        keys, values = (activations.x(layer, kind)[window].float().transpose(0, 1) for kind in "kv")
        rotated = activations.sites[layer].rotation.at(keys, self.skip)
        return dict(zip(_KINDS, (keys, rotated, values), strict=True))


def _draw(figure: Figure, drawn: dict[str, Any]) -> None:
    """A panel per layer and kind: rows are channels, columns tokens, blue small and red large, as in the thesis."""
    axes = figure.subplots(len(drawn["layers"]), len(_KINDS), squeeze=False)
    for row, (layer, kinds) in enumerate(zip(drawn["layers"], drawn["magnitudes"], strict=True)):
        keys = torch.tensor([kinds[kind] for kind in _KINDS[:2]], dtype=torch.float32)
        for column, kind in enumerate(_KINDS):
            axis, magnitudes = axes[row][column], torch.tensor(kinds[kind], dtype=torch.float32)
            # Both panels of keys share a color scale, whose limit few channels exceed.
            largest = (keys if column < 2 else magnitudes).quantile(0.995).item()
            extent = (drawn["first_token"] - 0.5, drawn["first_token"] + magnitudes.shape[1] - 0.5, len(magnitudes), 0)
            image = axis.imshow(magnitudes, cmap="bwr", vmin=0, vmax=largest, aspect="auto", extent=extent)
            axis.set_title(f"layer {layer}, head {drawn['head']}: {kind}", fontsize="medium")
            figure.colorbar(image, ax=axis)
        axes[row][0].set_ylabel("channel")
    for axis in axes[-1]:
        axis.set_xlabel("token")
