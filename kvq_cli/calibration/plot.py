"""Plot the calibration errors of an artifact by layer: keys and values, one line per block shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import UsageError
from kvq_cli.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Keys of a stream's errors that are drawn below, and labels.
_BELOW = {"bytes": "bytes of\na token", "adjacent_token_correlation": "correlation of\nadjacent tokens"}


def plot_errors(config: Mapping[str, Any], path: Path) -> None:
    """Plot the `errors` of an artifact's config; the file's extension (.png, .pdf, .svg) sets the format.

    Above: the Fisher-weighted error of each shape, with a ring around the chosen one. Below: the correlation of
    adjacent tokens; for transforms, the bytes of a token. The streams of a mixed method may share nothing but the
    chosen error, which is then drawn alone. Raises UsageError for an unknown extension, KvqError
    where the file cannot be written.
    """
    layers = config["errors"]["layers"]
    if "captured" not in config:
        raise UsageError(f"--plot {path}: {config['method']['name']} has no calibration errors to plot")
    streams = {kind: [layer[kind] for layer in layers] for kind in "kv"}
    below = next((key for key in _BELOW if all(key in one for kind in "kv" for one in streams[kind])), None)
    figure = new_figure(10, 6)
    heights = (3, 1) if below else (1,)
    axes = figure.subplots(len(heights), 2, sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    for column, (kind, title) in enumerate((("k", "keys"), ("v", "values"))):
        _draw_errors(axes[0][column], streams[kind])
        axes[0][column].set_title(title)
        if below:
            axes[1][column].bar(range(len(layers)), [one[below] for one in streams[kind]], color="0.6")
        axes[-1][column].set_xlabel("layer")
    axes[0][0].set_ylabel("relative error, Fisher-weighted")
    axes[0][0].set_ylim(bottom=0)
    axes[0][1].legend(loc="best")
    if below:
        axes[1][0].set_ylabel(_BELOW[below])
    axes[0][0].xaxis.get_major_locator().set_params(integer=True)
    method = config["method"]
    bits = f", {method['bits']:g} bits" if "bits" in method else ""
    figure.suptitle(f"{method['name']}{bits}, {config['model']['name']}: error on held-out calibration text")
    save(figure, path, "--plot")


def _draw_errors(axis: Axes, streams: list[Mapping[str, Any]]) -> None:
    shapes = [name for name in streams[0].get("shapes", ()) if all(name in one.get("shapes", ()) for one in streams)]
    for index, shape in enumerate(shapes):
        errors = [stream["shapes"][shape]["fisher"] for stream in streams]
        axis.plot(range(len(streams)), errors, marker="o", markersize=4, color=f"C{index}", label=shape)
    # With a choice per head, the error can be below those of all shapes.
    chosen = [stream["chosen"]["fisher"] for stream in streams]
    ring: dict[str, Any] = {
        "marker": "o",
        "markersize": 10,
        "markerfacecolor": "none",
        "linestyle": "none",
        "color": "black",
    }
    axis.plot(range(len(streams)), chosen, label="chosen", **ring)
    axis.grid(alpha=0.3)
