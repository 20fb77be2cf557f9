"""Magnitudes of keys, before and after RoPE, and of values, by channel and token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.papers.studies.activations import Activations, captured, spread
from kvq_cli.papers.studies.study import Findings, Show, Study, Subject, register

_SIDES = ("keys before RoPE", "keys after RoPE", "values")


def shares(magnitudes: Tensor) -> tuple[float, float]:
    """How much of the variance of magnitudes `[tokens, channels]` channels explain, and how much tokens do.

    The variance of the channels' means, and of the tokens' means, over that of all: both 0 ... 1, together at most 1.
    """
    x = magnitudes.double()
    whole = x.var(correction=0).clamp_min(1e-300)
    return tuple((x.mean(dim).var(correction=0) / whole).item() for dim in (0, 1))


@register
@dataclass(frozen=True)
class Magnitudes(Study):
    """Magnitudes by channel and token: keys before and after RoPE, and values.

    layers: how many are drawn. head: whose channels are drawn. tokens: how many are drawn. skip: first tokens of a
    window to leave out.
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

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        heads = subject.loaded.shape.kv_heads
        if self.head >= heads:
            raise UsageError(f"study magnitudes: head={self.head}, but the model has {heads} kv heads, from 0 on")
        found, pictures = [], []
        with captured(subject.loaded, subject.windows, show, skip=self.skip) as activations:
            drawn = spread(len(activations.layers), self.layers)
            for layer in activations.layers:
                show("magnitudes", layer, len(activations.layers))
                found.append(self._explained(activations, layer))
                if layer in drawn:
                    pictures.append(self._picture(activations, layer))
            show("magnitudes", len(found), len(found))
        rows = [
            [layer, side, one["channels"], one["tokens"]]
            for layer, sides in enumerate(found)
            for side, one in sides.items()
        ]
        numbers = {
            "explained": found,
            "drawn": {"layers": drawn, "head": self.head, "first_token": self.skip, "magnitudes": pictures},
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
                f"averaged over {heads} kv heads and {len(subject.windows)} windows: 1 where magnitudes are the same "
                f"all along a channel (or all across a token)."
            ],
        )

    def _explained(self, activations: Activations, layer: int) -> dict[str, dict[str, float]]:
        found = {side: [] for side in _SIDES}
        for window in range(len(activations.x(layer, "k"))):
            for side, numbers in self._sides(activations, layer, window).items():
                found[side] += [shares(head.abs()) for head in numbers]
        means = {side: [sum(one) / len(some) for one in zip(*some, strict=True)] for side, some in found.items()}
        return {side: {"channels": round(a, 5), "tokens": round(b, 5)} for side, (a, b) in means.items()}

    def _picture(self, activations: Activations, layer: int) -> dict[str, list[list[float]]]:
        """`[channels][tokens]` of the first window, three digits."""
        sides = self._sides(activations, layer, 0)
        return {
            side: [[float(f"{n:.3g}") for n in row] for row in numbers[self.head, : self.tokens].abs().T.tolist()]
            for side, numbers in sides.items()
        }

    def _sides(self, activations: Activations, layer: int, window: int) -> dict[str, Tensor]:
        """Float32 `[kv_heads, tokens, head_dim]` of one window."""
        keys, values = (activations.x(layer, kind)[window].float().transpose(0, 1) for kind in "kv")
        turned = activations.sites[layer].rotation.at(keys, self.skip)
        return dict(zip(_SIDES, (keys, turned, values), strict=True))


def _draw(figure, drawn: dict) -> None:
    """Rows are channels and columns tokens, from blue (small) over white to red (large), as in the thesis."""
    axes = figure.subplots(len(drawn["layers"]), len(_SIDES), squeeze=False)
    for row, (layer, sides) in enumerate(zip(drawn["layers"], drawn["magnitudes"], strict=True)):
        keys = torch.tensor([sides[side] for side in _SIDES[:2]])
        for column, side in enumerate(_SIDES):
            axis, magnitudes = axes[row][column], torch.tensor(sides[side])
            # Both pictures of the keys have one scale, whose end few channels exceed.
            largest = (keys if column < 2 else magnitudes).quantile(0.995).item()
            extent = (drawn["first_token"] - 0.5, drawn["first_token"] + magnitudes.shape[1] - 0.5, len(magnitudes), 0)
            image = axis.imshow(magnitudes, cmap="bwr", vmin=0, vmax=largest, aspect="auto", extent=extent)
            axis.set_title(f"layer {layer}, head {drawn['head']}: {side}", fontsize="medium")
            figure.colorbar(image, ax=axis)
        axes[row][0].set_ylabel("channel")
    for axis in axes[-1]:
        axis.set_xlabel("token")
