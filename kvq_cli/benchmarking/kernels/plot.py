"""The picture of a `kvq bench kernels` result: how many times faster than 16 bits, per store and shape."""

from __future__ import annotations

from pathlib import Path

from kvq_cli.figures import new_figure, save


def plot(document: dict, path: Path) -> None:
    """Bars of the ratio to the fastest 16-bit attention, a panel per batch and context; other operations as time."""
    rows = [row for row in document["rows"] if "us" in row]
    panels: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["operation"] == "decode_attention":
            panels.setdefault((row["batch"], row["context"]), []).append(row)
    lines = sorted({row["operation"] for row in rows} - {"decode_attention"})
    count = len(panels) + len(lines)
    across = min(3, count)
    down = -(-count // across)
    longest = max([len(found) for found in panels.values()], default=8)
    figure = new_figure(5.2 * across, max(3.0, 0.22 * longest + 1) * down)
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, ((batch, context), found) in zip(axes, panels.items(), strict=False):
        found = sorted(found, key=lambda row: row["ratio"])
        names = [row["case"].removeprefix("kvq ") for row in found]
        colors = ["tab:gray" if row["baseline"] else "tab:blue" for row in found]
        axis.barh(names, [row["ratio"] for row in found], color=colors)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"batch {batch}, {context} tokens", fontsize=10)
        axis.set_xlabel("times the fastest 16-bit attention (gray: 16 bits)", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="x", alpha=0.3)
    for axis, operation in zip(axes[len(panels) :], lines, strict=False):
        _times(axis, operation, [row for row in rows if row["operation"] == operation])
    for axis in axes[count:]:
        axis.remove()
    dry = " (dry run: times say nothing)" if document["dry"] else ""
    figure.suptitle(f"{document['machine']['device']}{dry}", fontsize=11)
    save(figure, path)


def _times(axis, operation: str, rows: list[dict]) -> None:
    model = max(dict.fromkeys(row.get("model", "") for row in rows))
    for case in dict.fromkeys(row["case"] for row in rows):
        found = [row for row in rows if row["case"] == case and row.get("model", "") == model]
        axis.plot([row["context"] for row in found], [row["us"]["p50"] for row in found], marker="o", label=case)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{operation}, {model}".rstrip(", "), fontsize=10)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_ylabel("microseconds", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    axis.grid(alpha=0.3)
