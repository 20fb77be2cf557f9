"""Effective rank of the key and value projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.attention.projections import projections
from kvq_cli.figures import integer_ticks
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def effective_rank(weight: Tensor) -> float:
    """exp of the entropy (nats) of the normalized singular values of `weight`, from 1 to its smaller dimension
    (thesis, 2.4.3; Roy and Vetterli, 2007)."""
    values = torch.linalg.svdvals(weight.detach().float())
    share = values / values.sum()
    return torch.special.entr(share).sum().exp().item()


@register
@dataclass(frozen=True)
class Rank(ModelStudy):
    """Effective rank of W_k and W_v by layer: how well low-rank factors can approximate them."""

    name = "rank"
    source = "TemporalKV Fig. 15"

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        sites = attention_layers(data.loaded.model)
        ranks, full_rank = [], 0
        for site in sites:
            progress("singular values", site.index, len(sites))
            weights = [projection.weight for projection in projections(site)]
            full_rank = min(weights[0].shape)
            ranks.append([effective_rank(weight) for weight in weights])
        progress("singular values", len(sites), len(sites))

        def draw(figure: Figure) -> None:
            axis = figure.subplots()
            for index, (name, color) in enumerate((("W_k", "tab:red"), ("W_v", "tab:blue"))):
                axis.plot([of_layer[index] for of_layer in ranks], "o-", color=color, label=name)
            axis.axhline(full_rank, color="0.4", linestyle=":", label="full rank")
            axis.set(xlabel="layer", ylabel="effective rank", ylim=(0, None))
            integer_ticks(axis)
            axis.legend()

        rows = [[layer, *of_layer] for layer, of_layer in enumerate(ranks)]
        numbers = {"W_k": [key for key, _ in ranks], "W_v": [value for _, value in ranks], "full": full_rank}
        notes = [f"Full rank, which equal singular values would give, is {full_rank}."]
        return Findings(["layer", "W_k", "W_v"], rows, numbers, draw, notes=notes)
