"""Effective rank of the key and value projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.analysis.study import Findings, Show, Study, Subject, register
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.attention.projections import projections


def effective_rank(weight: Tensor) -> float:
    """exp of the entropy (nats) of the normalized singular values of `weight` (thesis, 2.4.3; Roy and Vetterli, 2007):
    from 1 to the smaller of its two sizes."""
    values = torch.linalg.svdvals(weight.detach().float())
    share = values / values.sum()
    return torch.special.entr(share).sum().exp().item()


@register
@dataclass(frozen=True)
class Rank(Study):
    """Effective rank of W_k and W_v in each layer: how far they can be factorized."""

    name = "rank"
    source = "TemporalKV Fig. 15"

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        sites = attention_layers(subject.loaded.model)
        found, largest = [], 0
        for site in sites:
            show("singular values", site.index, len(sites))
            weights = [one.weight for one in projections(site)]
            largest = min(weights[0].shape)
            found.append([effective_rank(weight) for weight in weights])
        show("singular values", len(sites), len(sites))

        def draw(figure) -> None:
            axis = figure.subplots()
            for index, (name, color) in enumerate((("W_k", "tab:red"), ("W_v", "tab:blue"))):
                axis.plot([one[index] for one in found], "o-", color=color, label=name)
            axis.axhline(largest, color="0.4", linestyle=":", label="full rank")
            axis.set(xlabel="layer", ylabel="effective rank", ylim=(0, None))
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend()

        rows = [[layer, *one] for layer, one in enumerate(found)]
        numbers = {"W_k": [one[0] for one in found], "W_v": [one[1] for one in found], "full": largest}
        notes = [f"Full rank, of a matrix whose singular values are all the same, is {largest}."]
        return Findings(["layer", "W_k", "W_v"], rows, numbers, draw, notes=notes)
