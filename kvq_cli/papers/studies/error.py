"""Fisher-weighted error of chunks of adjacent tokens against chunks of adjacent channels, by layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import ERROR_MEASURE, calibrate_stream
from kvq_cli.errors import UsageError
from kvq_cli.figures import integer_ticks
from kvq_cli.methods.temporalkv import TemporalKV
from kvq_cli.papers.studies.activations import STREAMS, Activations, captured, clustered, spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHUNKS = (2, 4, 8)
_WIDEST = max(_CHUNKS)
_MAX_LOG_RATIO = 2.0  # limit of the color scale: errors that differ by a factor of 2^2


def some_channels(head_dim: int, count: int | None) -> Tensor:
    """Indices of about `count` channels of a head, in evenly spread runs of the widest chunk; None for all channels."""
    runs = head_dim // _WIDEST
    first = torch.tensor(spread(runs, runs if count is None else max(1, count // _WIDEST))) * _WIDEST
    return (first[:, None] + torch.arange(_WIDEST)).flatten()


def wins(errors: list[dict], chunk: int) -> dict[str, float]:
    """The share of "layers" and of "heads", over keys and values, in which chunks of tokens have the lower error.

    errors: by layer, `{"keys": {"2": {"temporal": ..., "channel": ...}, ...}, "values": ...}`.
    """
    pairs = [layer[name][str(chunk)] for layer in errors for name in STREAMS.values()]
    layers = [pair["temporal"]["fisher"] < pair["channel"]["fisher"] for pair in pairs]
    heads = [
        temporal < channel
        for pair in pairs
        for temporal, channel in zip(pair["temporal"]["by_head"], pair["channel"]["by_head"], strict=True)
    ]
    return {"layers": sum(layers) / len(layers), "heads": sum(heads) / len(heads)}


@register
@dataclass(frozen=True)
class Error(ModelStudy):
    """Fisher-weighted error by layer and head: chunks of 2, 4, 8 channels (ChannelKV) against tokens (TemporalKV).

    channels: about how many of each head, or none for all. points: the most chunks that a codebook is clustered from.
    skip: first tokens of a window to leave out.
    """

    name = "error"
    source = "TemporalKV Figs. 19, 22, 23"
    samples = 10

    channels: int | None = 16
    points: int = 4096
    iterations: int = 50
    skip: int = 8

    def __post_init__(self) -> None:
        if (self.channels or _WIDEST) < _WIDEST or self.points < 256 or self.iterations < 1 or self.skip < 0:
            raise UsageError(
                f"study error: channels must be at least {_WIDEST} or none, points 256, iterations 1, skip 0"
            )

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        shape, held_out = data.loaded.shape, max(1, data.samples // 5)
        if shape.head_dim % _WIDEST:
            raise UsageError(f"study error: chunks of {_WIDEST} channels do not divide head_dim={shape.head_dim}")
        training = (data.samples - held_out) * ((data.seqlen - self.skip) // _WIDEST * _WIDEST)
        if training < 256:
            raise UsageError(
                f"study error: {data.samples} windows of {data.seqlen} tokens, of which {held_out} are held out, "
                f"are too few for 256 centroids: raise --samples or --seqlen"
            )
        layers = range(len(shape.cached_layers))
        errors: list[dict] = [{name: {} for name in STREAMS.values()} for _ in layers]
        jobs = [(layer, kind, chunk) for layer in layers for kind in STREAMS for chunk in _CHUNKS]
        with captured(data.loaded, data.windows, progress, gradients=True, skip=self.skip) as activations:

            def measure(job: tuple[int, str, int]) -> None:
                layer, kind, chunk = job
                errors[layer][STREAMS[kind]][str(chunk)] = self._errors(activations, job, held_out, data.seed)

            clustered(measure, jobs, data.loaded.model.device, progress)
        numbers: dict[str, Any] = {
            "errors": errors,
            "temporal_lower": {str(chunk): wins(errors, chunk) for chunk in _CHUNKS},
        }
        size = (12, 2 + 3 * (0.9 + 0.11 * 2 * shape.kv_heads))
        channels = len(some_channels(shape.head_dim, self.channels))
        lower = [
            f"{chunk}: in {shares['layers']:.0%} of layers and {shares['heads']:.0%} of heads"
            for chunk, shares in numbers["temporal_lower"].items()
        ]
        notes = [
            f"Errors {ERROR_MEASURE}. {channels} channels of each head; {data.samples} windows of {data.seqlen} "
            f"tokens, of which {held_out} are held out; codebooks from at most {self.points} chunks.",
            f"Chunks of adjacent tokens have the lower error, by size of chunk: {'; '.join(lower)}.",
        ]
        return Findings(*_table(errors), numbers, lambda figure: _draw(figure, errors), size, notes)

    def _errors(self, activations: Activations, job: tuple[int, str, int], held_out: int, seed: int) -> dict:
        """Errors of both shapes of chunk, as the calibration of codebooks measures them."""
        layer, kind, chunk = job
        shape = activations.loaded.shape
        needed = TemporalKV(bits=8 // chunk, hybrid="head").calibration(shape)
        channels = some_channels(shape.head_dim, self.channels)
        x, g = (
            numbers[:, : numbers.shape[1] // _WIDEST * _WIDEST].index_select(3, channels.to(numbers.device))
            for numbers in (activations.x(layer, kind), activations.g(layer, kind))
        )
        recipe = ClusterSettings(True, "head", self.points, self.iterations, seed, shape.torch_dtype)
        spec = needed.keys if kind == "k" else needed.values
        _, measured = calibrate_stream(CapturedStream(x, g, held_out), spec, recipe)
        errors = {
            name: {"fisher": shape["fisher"], "by_head": shape["fisher_per_head"]}
            for name, shape in measured["shapes"].items()
        }
        return {**errors, "adjacent_token_correlation": measured["adjacent_token_correlation"]}


def _table(by_layer: list[dict]) -> tuple[list[str], list[list]]:
    columns = ["layer", "numbers", "correlation of tokens"]
    columns += [f"{chunk} {shape}" for chunk in _CHUNKS for shape in ("channels", "tokens")]
    rows = []
    for layer, streams in enumerate(by_layer):
        for name, chunks in streams.items():
            errors = [chunks[str(chunk)][shape]["fisher"] for chunk in _CHUNKS for shape in ("channel", "temporal")]
            rows.append([layer, name, chunks[str(_CHUNKS[0])]["adjacent_token_correlation"], *errors])
    return columns, rows


def _draw(figure: Figure, by_layer: list[dict]) -> None:
    """A row per size of chunk, with errors by layer on the left and by head on the right, in the thesis's colors."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["indigo", "mediumpurple", "white", "gold", "darkgoldenrod"])
    heads = len(by_layer[0]["keys"]["2"]["channel"]["by_head"])
    maps = [(_ratios(by_layer, chunk, by_head=False), _ratios(by_layer, chunk, by_head=True)) for chunk in _CHUNKS]
    axes = figure.subplots(len(_CHUNKS), 2, sharex=True)
    for row, (chunk, pair) in enumerate(zip(_CHUNKS, maps, strict=True)):
        for axis, ratios, lines, name in zip(axes[row], pair, (1, heads), ("layer", "head"), strict=True):
            image = axis.imshow(
                ratios, cmap=colors, vmin=-_MAX_LOG_RATIO, vmax=_MAX_LOG_RATIO, aspect="auto", interpolation="nearest"
            )
            axis.set_yticks([(lines - 1) / 2, lines + (lines - 1) / 2], list(STREAMS.values()))
            axis.axhline(lines - 0.5, color="black", linewidth=0.8)
            axis.set_title(f"chunks of {chunk}, by {name}")
            integer_ticks(axis)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    label = "log2 of error of channels / of tokens\nchannels lower (purple) · tokens lower (yellow)"
    figure.colorbar(image, ax=axes, label=label, extend="both")


def _ratios(by_layer: list[dict], chunk: int, *, by_head: bool) -> Tensor:
    """log2 of the error of channels over that of tokens, `[2 or 2 kv_heads, layers]`: keys, then values."""
    errors = [
        [
            [stream[str(chunk)][shape]["by_head" if by_head else "fisher"] for shape in ("channel", "temporal")]
            for stream in layer.values()
        ]
        for layer in by_layer
    ]
    pairs = torch.tensor(errors, dtype=torch.float32).clamp_min(1e-30)  # [layers, 2 streams, 2 shapes, ...]
    ratios = (pairs[:, :, 0] / pairs[:, :, 1]).log2()
    return ratios.flatten(1).T
