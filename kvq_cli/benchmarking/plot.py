"""Figures of `kvq bench generate` results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time per token (p20 to p80 shaded) above cache size over the context, a column per batch size."""
    batches = sorted({row["batch"] for row in rows})
    figure = new_figure(1.5 + 4.2 * len(batches), 7)
    axes = figure.subplots(2, len(batches), squeeze=False, sharex=True)
    for column, batch in enumerate(batches):
        upper, lower = axes[0][column], axes[1][column]
        upper.set_title(f"batch {batch}", fontsize=10)
        for peer in dict.fromkeys(row["peer"] for row in rows):
            measured = sorted((r for r in rows if (r["batch"], r["peer"]) == (batch, peer)), key=lambda r: r["context"])
            contexts = [row["context"] for row in measured]
            upper.plot(contexts, [row["token_ms"]["p50"] for row in measured], marker="o", label=peer)
            spread = [[row["token_ms"][p] for row in measured] for p in ("p20", "p80")]
            upper.fill_between(contexts, *spread, alpha=0.2)
            lower.plot(contexts, [row["cache_bytes"] / 2**20 for row in measured], marker="o")
        _style(upper, contexts)
        _style(lower, contexts)
        lower.set_xlabel("context (tokens)")
    axes[0][0].set_ylabel("ms per decoded token (lower is better)")
    axes[1][0].set_ylabel("cache, MiB (lower is better)")
    figure.suptitle(title, fontsize=10)
    figure.legend(handles=axes[0][0].lines, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save(figure, path)


def _style(axis: Axes, contexts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.set_ylim(bottom=0)  # so that heights are proportional to values
    axis.grid(alpha=0.3)


def plot_batch_sweep(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw throughput over batch size up to the largest that fits in memory, a line per cache."""
    figure = new_figure(7, 4.5)
    axis = figure.subplots()
    for peer in dict.fromkeys(row["peer"] for row in rows):
        measured = sorted((r for r in rows if r["peer"] == peer and "failed" not in r), key=lambda r: r["batch"])
        batches = [row["batch"] for row in measured]
        axis.plot(batches, [row["tokens_s"] for row in measured], marker="o", label=peer)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("batch, up to the largest that fits in memory")
    axis.set_ylabel("decoded tokens per second (higher is better)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(title, fontsize=10)
    save(figure, path)
