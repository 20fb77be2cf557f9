"""Figures to files, without a display: the ending says which kind."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError
from kvq_cli.files import cannot_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, in which matplotlib makes room for labels and outer legends.

    UsageError without matplotlib.
    """
    if not has_matplotlib():
        raise UsageError("pictures need matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def check_format(path: Path) -> None:
    """Raise UsageError unless the file's ending names a kind of picture."""
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise UsageError(f"--plot {path}: unknown ending; use .png, .pdf or .svg")


def save(figure: Figure, path: Path, option: str = "--out") -> None:
    """Write the figure, whole or not at all, and its folder where there is none.

    UsageError for an ending that cannot be drawn, KvqError, which names `option`, where the file cannot be
    written.
    """
    check_format(path)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, dpi=130)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise cannot_write(path, error, option) from error
