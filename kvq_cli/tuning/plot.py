"""Pictures of a search: KL divergence over bits, and the bits of each layer's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.artifact.names import TUNING_FILE
from kvq_cli.figures import integer_ticks, new_figure, save
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import from_config

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pictures(config: Mapping[str, Any]) -> dict[str, bytes]:
    """The picture of a tuned artifact's card."""
    data = BytesIO()
    _figure(config).savefig(data, format="png", dpi=110, metadata={"Software": None})
    return {TUNING_FILE: data.getvalue()}


def plot_tuning(config: Mapping[str, Any], path: Path) -> None:
    """Draw the same picture into a .png, .pdf or .svg file. UsageError for other extensions, KvqError where the file
    cannot be written."""
    save(_figure(config), path, "--plot")


def stream_bits(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bits of the codes per number of each layer's keys ("k") and values ("v")."""
    method, layers = from_config(config["method"]), len(config["errors"]["layers"])
    assert isinstance(method, Mixed)
    return {kind: [method.component(layer, kind).nominal_bits for layer in range(layers)] for kind in "kv"}


def _figure(config: Mapping[str, Any]) -> Figure:
    figure = new_figure(11, 4)
    curve, choice = figure.subplots(1, 2, width_ratios=(2, 3))
    _draw_curve(curve, config["tuning"])
    _draw_choice(choice, stream_bits(config))
    figure.suptitle(f"{config['model']['name']}: tuned on {', '.join(config['tuning']['text'])}")
    return figure


def _draw_curve(axes: Axes, tuning: Mapping[str, Any]) -> None:
    predicted, tried = tuning["predicted"], tuning["tried"]
    axes.plot([p["bits"] for p in predicted], [p["kl"] for p in predicted], color="0.6", label="predicted")
    axes.plot(tried[0]["bits"], tried[0]["kl"], "s", color="C1", label=tried[0]["step"])
    axes.plot([p["bits"] for p in tried[1:]], [p["kl"] for p in tried[1:]], "o", color="C0", label="tried")
    best = tried[tuning["chosen"]]
    axes.plot(best["bits"], best["kl"], "o", color="black", markersize=11, fillstyle="none", label="chosen")
    axes.set(xlabel="packed bits per number", ylabel="KL to fp16, nats per token", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_choice(axes: Axes, bits: Mapping[str, list[float]]) -> None:
    for offset, (kind, label) in enumerate((("k", "keys"), ("v", "values"))):
        axes.bar([layer + 0.4 * offset - 0.2 for layer in range(len(bits[kind]))], bits[kind], 0.4, label=label)
    axes.set(xlabel="layer", ylabel="bits of the codes per number")
    integer_ticks(axes)
    axes.legend()
