"""Effective rank of the key and value projections, and of what they are applied to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.attention.projections import projections
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.activation_hooks import watch_inputs
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def effective_rank(matrix: Tensor) -> float:
    """exp of the entropy (nats) of the normalized singular values of `matrix`, from 1 to its smaller dimension
    (thesis, 2.4.3; Roy and Vetterli, 2007)."""
    return _effective_rank(torch.linalg.svdvals(matrix.detach().float()))


def _effective_rank(values: Tensor) -> float:
    share = values / values.sum()
    return torch.special.entr(share).sum().exp().item()


def in_random_order(weight: Tensor, seed: int = 0) -> Tensor:
    """The matrix with its entries in random order: what is left of its spectrum without any structure."""
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    return weight.detach().flatten()[order.to(weight.device)].view_as(weight)


@dataclass
class Spectrum:
    """Squares of a matrix's singular values: the sum of its rows' outer products, `[channels, channels]` float64."""

    squares: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        """Rows `[rows, channels]`."""
        rows = rows.double()
        self.squares = self.squares + rows.T @ rows

    def effective_rank(self) -> float:
        """`effective_rank` of all rows."""
        assert isinstance(self.squares, Tensor)
        return _effective_rank(torch.linalg.eigvalsh(self.squares).clamp_min(0).sqrt())


@register
@dataclass(frozen=True)
class Rank(ModelStudy):
    """Effective rank of W_k and W_v by layer: how well low-rank factors can approximate them.

    Beside it, that of W_k with its entries in random order, of the layer's inputs X, and of its keys before RoPE; the
    first token of each window, whose X can be hundreds of times as large, is left out of these.
    """

    name = "rank"
    source = "TemporalKV Fig. 15"

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`. Memory: two square matrices of X's and the keys' channels per layer, in float64."""
        sites, windows = attention_layers(data.loaded.model), data.windows
        spectra = {kind: [Spectrum() for _ in sites] for kind in "xk"}

        def sink(layer: int, kind: str, numbers: Tensor) -> None:
            if kind in spectra:
                spectra[kind][layer].add(numbers[1:])

        for index, tokens in enumerate(windows):
            progress("windows", index, len(windows))
            watch_inputs(data.loaded.model, sites, tokens, sink)
        progress("windows", len(windows), len(windows))
        ranks, full_rank = [], 0
        for place, site in enumerate(sites):
            progress("singular values", place, len(sites))
            weights = [projection.weight for projection in projections(site)]
            full_rank = min(weights[0].shape)
            matrices = [*weights, in_random_order(weights[0])]
            activations = [spectra[kind][place].effective_rank() for kind in "xk"]
            ranks.append([*map(effective_rank, matrices), *activations])
        progress("singular values", len(sites), len(sites))

        rows = [[layer, *of_layer] for layer, of_layer in enumerate(ranks)]
        names = ["W_k", "W_v", "W_k in random order", "X", "keys"]
        numbers: dict[str, Any] = dict(zip(names, map(list, zip(*ranks, strict=True)), strict=True))
        notes = [f"Full rank of the weights, which equal singular values would give, is {full_rank}."]
        numbers["full"] = full_rank
        return Findings(["layer", *names], rows, numbers, lambda figure: _draw(figure, numbers), notes=notes)


def _draw(figure: Figure, numbers: dict[str, Any]) -> None:
    """Ranks by layer, of the weights on the left and of the activations on the right."""
    weights, activations = figure.subplots(1, 2)
    for name, color in (("W_k", "tab:red"), ("W_v", "tab:blue"), ("W_k in random order", "tab:gray")):
        weights.plot(numbers[name], "o-", color=color, label=name)
    weights.axhline(numbers["full"], color="0.4", linestyle=":", label="full rank")
    for name, color in (("X", "tab:green"), ("keys", "tab:orange")):
        activations.plot(numbers[name], "o-", color=color, label=name)
    for axis in (weights, activations):
        axis.set(xlabel="layer", ylabel="effective rank", ylim=(0, None))
        integer_ticks(axis)
        axis.legend()
