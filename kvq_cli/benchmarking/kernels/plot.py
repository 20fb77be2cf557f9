"""The figure of a `kvq bench kernels` result: speed-up over 16-bit attention per store and shape, and times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Operations that compute what 16-bit attention does.
ATTENTION = ("decode_attention", "transform_attention")


def plot(document: dict[str, Any], path: Path) -> bool:
    """Draw bars of the speed-up over the fastest 16-bit attention, a panel per operation, batch and context, and a
    panel of times for each other operation. Returns whether there was anything to draw: kernels and baselines may all
    have failed."""
    rows = [row for row in document["rows"] if "us" in row]
    panels: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["operation"] in ATTENTION and "ratio" in row:
            panels.setdefault((row["operation"], row["batch"], row["context"]), []).append(row)
    others = sorted({row["operation"] for row in rows}.difference(ATTENTION))
    count = len(panels) + len(others)
    if not count:
        return False
    columns = min(3, count)
    lines = -(-count // columns)
    bars = max([len(cases) for cases in panels.values()], default=8)
    figure = new_figure(5.2 * columns, max(3.0, 0.22 * bars + 1) * lines)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, ((operation, batch, context), cases) in zip(axes, panels.items(), strict=False):
        _draw_ratios(axis, f"{operation}, batch {batch}, {context} tokens", cases)
    for axis, operation in zip(axes[len(panels) :], others, strict=False):
        _draw_times(axis, operation, [row for row in rows if row["operation"] == operation])
    for axis in axes[count:]:
        axis.remove()
    dry = " (dry run: times say nothing)" if document["dry"] else ""
    figure.suptitle(f"{document['machine']['device']}{dry}", fontsize=11)
    save(figure, path)
    return True


def _draw_ratios(axis: Axes, title: str, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: row["ratio"])
    colors = ["tab:gray" if row["baseline"] else "tab:blue" for row in rows]
    axis.barh([row["case"].removeprefix("kvq ") for row in rows], [row["ratio"] for row in rows], color=colors)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("times the fastest 16-bit attention (gray: 16 bits)", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(axis="x", alpha=0.3)


def _draw_times(axis: Axes, operation: str, rows: list[dict[str, Any]]) -> None:
    """Draw times over the context, a line per case, for the model whose name sorts last."""
    model = max(dict.fromkeys(row.get("model", "") for row in rows))
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = [row for row in rows if row["case"] == case and row.get("model", "") == model]
        axis.plot([row["context"] for row in timed], [row["us"]["p50"] for row in timed], marker="o", label=case)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{operation}, {model}".rstrip(", "), fontsize=10)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_ylabel("microseconds", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    axis.grid(alpha=0.3)
