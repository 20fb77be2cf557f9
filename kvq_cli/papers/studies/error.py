"""Fisher-weighted error of chunks of adjacent tokens against chunks of adjacent channels, by layer and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.calibration.codebooks import ERROR_MEASURE, Captured, Recipe, calibrate_stream
from kvq_cli.errors import UsageError
from kvq_cli.methods.temporalkv import TemporalKV
from kvq_cli.papers.studies.activations import STREAMS, Activations, captured, clustered, spread
from kvq_cli.papers.studies.study import Findings, Show, Study, Subject, register

_CHUNKS = (2, 4, 8)
_WIDEST = max(_CHUNKS)
_STRONGEST = 2.0  # where a color is at its end: errors that differ by a factor of 2^2


def some_channels(head_dim: int, count: int | None) -> Tensor:
    """About `count` channels of a head, in whole runs of the largest chunk, evenly spread; all where None."""
    runs = head_dim // _WIDEST
    first = torch.tensor(spread(runs, runs if count is None else max(1, count // _WIDEST))) * _WIDEST
    return (first[:, None] + torch.arange(_WIDEST)).flatten()


def wins(found: list[dict], chunk: int) -> dict[str, float]:
    """In what share of "layers" and of "heads", of keys and values, chunks of adjacent tokens have the lower error."""
    errors = [one[name][str(chunk)] for one in found for name in STREAMS.values()]
    layers = [one["temporal"]["fisher"] < one["channel"]["fisher"] for one in errors]
    heads = [
        temporal < channel
        for one in errors
        for temporal, channel in zip(one["temporal"]["by_head"], one["channel"]["by_head"], strict=True)
    ]
    return {"layers": sum(layers) / len(layers), "heads": sum(heads) / len(heads)}


@register
@dataclass(frozen=True)
class Error(Study):
    """Fisher-weighted error by layer and head: chunks of 2, 4, 8 channels (ChannelKV) against tokens (TemporalKV).

    channels: of each head, about; none: all. points: chunks that a codebook is clustered from, at most. skip: first
    tokens of a window to leave out.
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

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`."""
        shape, held_out = subject.loaded.shape, max(1, subject.samples // 5)
        if shape.head_dim % _WIDEST:
            raise UsageError(f"study error: chunks of {_WIDEST} channels do not divide head_dim={shape.head_dim}")
        training = (subject.samples - held_out) * ((subject.seqlen - self.skip) // _WIDEST * _WIDEST)
        if training < 256:
            raise UsageError(
                f"study error: {subject.samples} windows of {subject.seqlen} tokens, of which {held_out} are held out, "
                f"are too few for 256 centroids: raise --samples or --seqlen"
            )
        found: list[dict] = [{name: {} for name in STREAMS.values()} for _ in range(shape.layers)]
        jobs = [(layer, kind, chunk) for layer in range(shape.layers) for kind in STREAMS for chunk in _CHUNKS]
        with captured(subject.loaded, subject.windows, show, gradients=True, skip=self.skip) as activations:

            def measure(job: tuple[int, str, int]) -> None:
                layer, kind, chunk = job
                found[layer][STREAMS[kind]][str(chunk)] = self._errors(activations, job, held_out, subject.seed)

            clustered(measure, jobs, subject.loaded.model.device, show)
        numbers = {"errors": found, "temporal_lower": {str(chunk): wins(found, chunk) for chunk in _CHUNKS}}
        size = (12, 2 + 3 * (0.9 + 0.11 * 2 * shape.kv_heads))
        channels = len(some_channels(shape.head_dim, self.channels))
        lower = [
            f"{chunk}: in {one['layers']:.0%} of layers and {one['heads']:.0%} of heads"
            for chunk, one in numbers["temporal_lower"].items()
        ]
        notes = [
            f"Errors {ERROR_MEASURE}. {channels} channels of each head; {subject.samples} windows of {subject.seqlen} "
            f"tokens, of which {held_out} are held out; codebooks from at most {self.points} chunks.",
            f"Chunks of adjacent tokens have the lower one, by size of chunk: {'; '.join(lower)}.",
        ]
        return Findings(*_table(found), numbers, lambda figure: _draw(figure, found), size, notes)

    def _errors(self, activations: Activations, job: tuple[int, str, int], held_out: int, seed: int) -> dict:
        """What the calibration of codebooks measures of both shapes."""
        layer, kind, chunk = job
        shape = activations.loaded.shape
        needed = TemporalKV(bits=8 // chunk, hybrid="head").calibration(shape)
        channels = some_channels(shape.head_dim, self.channels)
        x, g = (
            numbers[:, : numbers.shape[1] // _WIDEST * _WIDEST].index_select(3, channels.to(numbers.device))
            for numbers in (activations.x(layer, kind), activations.g(layer, kind))
        )
        recipe = Recipe(True, "head", self.points, self.iterations, seed, shape.dtype)
        spec = needed.keys if kind == "k" else needed.values
        _, measured = calibrate_stream(Captured(x, g, held_out), spec, recipe)
        found = {
            name: {"fisher": one["fisher"], "by_head": one["fisher_per_head"]}
            for name, one in measured["shapes"].items()
        }
        return {**found, "adjacent_token_correlation": measured["adjacent_token_correlation"]}


def _table(found: list[dict]) -> tuple[list[str], list[list]]:
    columns = ["layer", "numbers", "correlation of tokens"]
    columns += [f"{chunk} {shape}" for chunk in _CHUNKS for shape in ("channels", "tokens")]
    rows = []
    for layer, streams in enumerate(found):
        for name, chunks in streams.items():
            errors = [chunks[str(chunk)][shape]["fisher"] for chunk in _CHUNKS for shape in ("channel", "temporal")]
            rows.append([layer, name, chunks[str(_CHUNKS[0])]["adjacent_token_correlation"], *errors])
    return columns, rows


def _draw(figure, found: list[dict]) -> None:
    """Above chunks of 2, below of 8; left by layer, right by head; the thesis's colours."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["indigo", "mediumpurple", "white", "gold", "darkgoldenrod"])
    heads = len(found[0]["keys"]["2"]["channel"]["by_head"])
    maps = [(_ratios(found, chunk, by_head=False), _ratios(found, chunk, by_head=True)) for chunk in _CHUNKS]
    axes = figure.subplots(len(_CHUNKS), 2, sharex=True)
    for row, (chunk, pair) in enumerate(zip(_CHUNKS, maps, strict=True)):
        for axis, ratios, each, name in zip(axes[row], pair, (1, heads), ("layer", "head"), strict=True):
            image = axis.imshow(
                ratios, cmap=colors, vmin=-_STRONGEST, vmax=_STRONGEST, aspect="auto", interpolation="nearest"
            )
            axis.set_yticks([(each - 1) / 2, each + (each - 1) / 2], list(STREAMS.values()))
            axis.axhline(each - 0.5, color="black", linewidth=0.8)
            axis.set_title(f"chunks of {chunk}, by {name}")
            axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    label = "log2 of error of channels / of tokens\nchannels lower (purple) · tokens lower (yellow)"
    figure.colorbar(image, ax=axes, label=label, extend="both")


def _ratios(found: list[dict], chunk: int, *, by_head: bool) -> Tensor:
    """`[2 or 2 kv_heads, layers]`: keys, then values."""
    errors = [
        [
            [stream[str(chunk)][shape]["by_head" if by_head else "fisher"] for shape in ("channel", "temporal")]
            for stream in one.values()
        ]
        for one in found
    ]
    pairs = torch.tensor(errors).clamp_min(1e-30)  # [layers, 2 streams, 2 shapes, ...]
    ratios = (pairs[:, :, 0] / pairs[:, :, 1]).log2()
    return ratios.flatten(1).T
