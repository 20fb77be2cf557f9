"""Create matplotlib figures and save them to files, without a display."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError
from kvq_cli.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, with constrained layout. UsageError without matplotlib."""
    if not has_matplotlib():
        raise UsageError("plots need matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def integer_ticks(axes: Axes) -> None:
    """Place the x axis's ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    locator = axes.xaxis.get_major_locator()
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)


def check_format(path: Path) -> None:
    """Raise UsageError unless matplotlib can write files with this extension."""
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise UsageError(f"--plot {path}: unknown file format; use .png, .pdf or .svg")


def save(figure: Figure, path: Path, option: str = "--out") -> None:
    """Write the figure atomically, creating its folder; the extension sets the format.

    option: the flag to name where the file cannot be written. Raises UsageError for an unknown format, KvqError where
    the file cannot be written.
    """
    check_format(path)
    with replacing(path, option) as partial:
        figure.savefig(partial, dpi=130, format=path.suffix.lstrip("."))
