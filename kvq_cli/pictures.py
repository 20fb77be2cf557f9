"""Figures to files, without a display: the ending says which kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.artifact.format import cannot_write
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **options) -> Figure:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def check_ending(path: Path) -> None:
    """Raise UsageError unless the file's ending names a kind of picture."""
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise UsageError(f"--plot {path}: unknown ending; use .png, .pdf or .svg")


def save(figure: Figure, path: Path) -> None:
    """Write the figure, whole or not at all. UsageError for an ending that cannot be drawn, KvqError where the file
    cannot be written."""
    check_ending(path)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(part, dpi=130)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
