"""SQuat's two hyper-parameters: rank r of the query subspace and strength lambda of its error term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvq_cli.methods.squat import Squat
from kvq_cli.papers.studies.predictions import predictions
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIVI = "kivi"
#: Rank and strength.
GridPoint: TypeAlias = tuple[int, float]


@register
@dataclass(frozen=True)
class Ablation(ModelStudy):
    """SQuat with other ranks r and strengths lambda: KL divergence of predictions from the uncompressed model's.

    ranks, strengths: the grid, comma-separated. Divergence: KL(p_exact || p_method) per token of the second half of
    each window; the paper scores GSM8K, which needs a model that can solve it. kivi: SQuat with lambda = 0. The
    residual window is the paper's: `group` recent tokens (appendix E.2).
    """

    name = "ablation"
    source = "SQuat Table 3"
    samples = 2

    ranks: tuple[int, ...] = (5, 10, 20, 40, 60)
    strengths: tuple[float, ...] = (0.0001, 0.0005, 0.001, 0.01, 0.1)
    bits: int = 2
    group: int = 32
    pre_rope: bool = False

    def __post_init__(self) -> None:
        self.methods()

    def methods(self) -> dict[GridPoint | str, Squat]:
        """The method of each grid point, and the baseline; UsageError for values that SQuat refuses."""
        methods: dict[GridPoint | str, Squat] = {KIVI: self._squat(strength=0.0)}
        return methods | {(r, s): self._squat(s, rank=r) for r in self.ranks for s in self.strengths}

    def _squat(self, strength: float, rank: int = Squat.rank) -> Squat:
        return Squat(
            bits=self.bits,
            group=self.group,
            residual=self.group,
            pre_rope=self.pre_rope,
            rank=rank,
            strength=strength,
        )

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        measured = predictions(data.loaded, data.windows, self.methods(), progress)
        kivi = measured[KIVI]
        grid = [[measured[r, s].kl for s in self.strengths] for r in self.ranks]
        rows = [[f"r={r}", *line] for r, line in zip(self.ranks, grid, strict=True)]
        best, (rank, strength) = min((each.kl, key) for key, each in measured.items() if isinstance(key, tuple))
        numbers = {
            "ranks": list(self.ranks),
            "strengths": list(self.strengths),
            "kl": grid,
            "perplexity": [[measured[r, s].perplexity for s in self.strengths] for r in self.ranks],
            "top1": [[measured[r, s].top1 for s in self.strengths] for r in self.ranks],
            "kivi": {"kl": kivi.kl, "perplexity": kivi.perplexity, "top1": kivi.top1},
        }
        columns = ["KL per token", *(f"lambda={s:g}" for s in self.strengths)]
        notes = [
            f"kivi (lambda = 0): {kivi.kl:.4g}; best: {best:.4g} with r={rank}, lambda={strength:g}; "
            f"{kivi.packed_bits:.2f} bits per packed number"
        ]
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (8, 5), notes)


def _draw(figure: Figure, numbers: dict[str, Any]) -> None:
    """The grid as a heat map: blue where SQuat diverges less than KIVI, red where it diverges more."""
    axis, base = figure.subplots(), numbers["kivi"]["kl"]
    change = [[value / base - 1 for value in line] for line in numbers["kl"]]
    image = axis.imshow(change, cmap="RdBu_r", vmin=-0.5, vmax=0.5, aspect="auto")
    for y, line in enumerate(numbers["kl"]):
        for x, value in enumerate(line):
            color = "white" if abs(change[y][x]) > 0.35 else "black"
            axis.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=9, color=color)
    axis.set_xticks(range(len(numbers["strengths"])), [f"{s:g}" for s in numbers["strengths"]])
    axis.set_yticks(range(len(numbers["ranks"])), [str(r) for r in numbers["ranks"]])
    axis.set(xlabel="strength lambda", ylabel="rank r", title=f"KL divergence per token; kivi: {base:.3g}")
    figure.colorbar(image, ax=axis, label="change from kivi", extend="both", format="{x:+.0%}")
