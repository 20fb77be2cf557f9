"""Effective rank of the key and value projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.analysis.study import Findings, Show, Study, Subject, register
from kvq_cli.attention.projections import projections
from kvq_cli.attention.taps import iter_attention


def effective_rank(weight: Tensor) -> float:
    """exp of the entropy (nats) of the normalized singular values of `weight` (Roy and Vetterli, 2007)."""
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
        sites = iter_attention(subject.loaded.model)
        found = []
        for site in sites:
            show("singular values", site.index, len(sites))
            found.append([effective_rank(one.weight) for one in projections(site)])
        show("singular values", len(sites), len(sites))

        def draw(figure) -> None:
            axis = figure.subplots()
            for index, name in enumerate(("W_k", "W_v")):
                axis.plot([one[index] for one in found], marker="o", label=name)
            axis.set(xlabel="layer", ylabel="effective rank", ylim=(0, None))
            axis.legend()

        rows = [[layer, *one] for layer, one in enumerate(found)]
        numbers = {"W_k": [one[0] for one in found], "W_v": [one[1] for one in found]}
        return Findings(["layer", "W_k", "W_v"], rows, numbers, draw)
