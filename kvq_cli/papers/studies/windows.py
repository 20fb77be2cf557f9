"""Lengths of the full-precision windows: whether sinks or recent tokens help more (InnerQ)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.innerq import InnerQ
from kvq_cli.methods.kivi import Kivi
from kvq_cli.papers.studies.predictions import Predictions, predictions
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("kivi", "innerq", "innerq, symmetric")
#: A point of a sweep: sinks and recent tokens in full precision.
Point = tuple[int, int]


@register
@dataclass(frozen=True)
class Windows(ModelStudy):
    """KL divergence of predictions from the uncompressed model's, with more sinks or recent tokens in full precision.

    sinks, recent: the lengths to try, comma-separated, each with the other window at `at_recent` or `at_sinks`; then
    the lengths of sinks again, with both windows together at that total. Divergence: KL(p_exact || p_method) per token
    of the second half of each window; the paper scores GSM8K, which needs a model that can solve it.
    """

    name = "windows"
    source = "InnerQ Fig. 5"
    samples = 2

    sinks: tuple[int, ...] = (0, 8, 32, 64)
    recent: tuple[int, ...] = (0, 32, 96, 160)
    at_sinks: int = 32
    at_recent: int = 96
    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        if not self.sweeps()["split"]:
            raise UsageError(
                f"study windows: sinks={','.join(map(str, self.sinks))}: at least one must be at most at_sinks + "
                f"at_recent={self.at_sinks + self.at_recent}"
            )
        for name in METHODS:
            for point in self.sweeps().values():
                for sinks, recent in point:
                    self.method(name, sinks, recent)

    def method(self, name: str, sinks: int, recent: int) -> Method:
        """The method with this name in `METHODS` and these windows; UsageError if it refuses them."""
        if name == "kivi":
            return Kivi(bits=self.bits, group=self.group, sinks=sinks, recent=recent)
        mode = "symmetric" if name.endswith("symmetric") else "hybrid"
        return InnerQ(bits=self.bits, group=self.group, sinks=sinks, recent=recent, mode=mode)

    def sweeps(self) -> dict[str, list[Point]]:
        """The points of each sweep."""
        both = self.at_sinks + self.at_recent
        return {
            "sinks": [(sinks, self.at_recent) for sinks in self.sinks],
            "recent": [(self.at_sinks, recent) for recent in self.recent],
            "split": [(sinks, both - sinks) for sinks in self.sinks if sinks <= both],
        }

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        points = dict.fromkeys(point for sweep in self.sweeps().values() for point in sweep)
        longest = max(sinks + recent for sinks, recent in points)
        if data.seqlen < 2 * (longest + self.group):
            raise UsageError(
                f"study windows: --seqlen {data.seqlen} is too short for windows of {longest} tokens: half of it "
                f"must hold them and a group of {self.group}"
            )
        methods = {(name, *point): self.method(name, *point) for point in points for name in METHODS}
        measured = predictions(data.loaded, data.windows, methods, progress)
        sweeps = {
            sweep: {"sinks": [s for s, _ in points], "recent": [r for _, r in points], **_by_method(measured, points)}
            for sweep, points in self.sweeps().items()
        }
        rows = [
            [sweep, *point, *(measured[name, *point].kl for name in METHODS)]
            for sweep, points in self.sweeps().items()
            for point in points
        ]
        bits = {name: mean(each.packed_bits for key, each in measured.items() if key[0] == name) for name in METHODS}
        notes = [
            "KL divergence per token, in nats; bits per packed number: "
            + ", ".join(f"{name} {count:.2f}" for name, count in bits.items())
        ]
        numbers = {"sweeps": sweeps, "packed_bits": bits}
        columns = ["sweep", "sinks", "recent", *METHODS]
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, sweeps), (12, 4.2), notes)


def _by_method(measured: dict[tuple, Predictions], points: list[Point]) -> dict:
    """KL divergence, perplexity and agreement at the points of a sweep, by method."""
    return {
        key: {name: [getattr(measured[name, *point], key) for point in points] for name in METHODS}
        for key in ("kl", "perplexity", "top1")
    }


def _draw(figure: Figure, sweeps: dict) -> None:
    titles = {
        "sinks": f"recent tokens: {sweeps['sinks']['recent'][0]}",
        "recent": f"sinks: {sweeps['recent']['sinks'][0]}",
        "split": f"both together: {sweeps['split']['sinks'][0] + sweeps['split']['recent'][0]}",
    }
    axes = figure.subplots(1, len(titles), sharey=True)
    for axis, (sweep, title) in zip(axes, titles.items(), strict=True):
        along = "recent" if sweep == "recent" else "sinks"
        for name, style in zip(METHODS, ("o-", "s-", "^--"), strict=True):
            axis.plot(sweeps[sweep][along], sweeps[sweep]["kl"][name], style, markersize=5, label=name)
        axis.set(title=title, xlabel=f"{along} in full precision" if along == "sinks" else "recent in full precision")
        axis.set_xticks(sweeps[sweep][along])
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="KL divergence per token (lower is better)", yscale="log")
    axes[0].legend(fontsize=8)
