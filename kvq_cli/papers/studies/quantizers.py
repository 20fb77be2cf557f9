"""Product against residual quantization of blocks of adjacent tokens, at the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.calibration.blocks import draw_coreset, to_blocks
from kvq_cli.calibration.kmeans import nearest, weighted_kmeans
from kvq_cli.calibration.statistics import mean_std
from kvq_cli.errors import UsageError
from kvq_cli.methods.specs import BlockShape
from kvq_cli.papers.studies.activations import STREAMS, Activations, captured, clustered, spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAGES = 2  # m of the thesis
_DIMS = (4, 8, 16)


@dataclass(frozen=True)
class ProductQuantizer:
    """Splits a vector into equal pieces and encodes each by the nearest centroid of its own codebook (thesis, 2.3.2).

    books: one per piece, `[codebooks, entries, size / pieces]`.
    """

    books: list[Tensor]

    @classmethod
    def fit(cls, points: Tensor, stages: int, entries: int, iterations: int, seed: int) -> ProductQuantizer:
        """Fit codebooks of `stages` pieces to `points` `[codebooks, points, size]` by k-means."""
        return cls([_clustered(piece, entries, iterations, seed) for piece in points.chunk(stages, dim=2)])

    def encode(self, points: Tensor) -> list[Tensor]:
        """`points` `[codebooks, points, size]` -> per piece, the index of its centroid `[codebooks, points]`."""
        pieces = points.chunk(len(self.books), dim=2)
        return [nearest(piece.contiguous(), book) for piece, book in zip(pieces, self.books, strict=True)]

    def decode(self, codes: list[Tensor]) -> Tensor:
        """The concatenated centroids, `[codebooks, points, size]`."""
        return torch.cat([_lookup(book, code) for book, code in zip(self.books, codes, strict=True)], dim=2)


@dataclass(frozen=True)
class ResidualQuantizer:
    """Encodes a vector by the nearest centroid, then the residual by that of the next stage (thesis, Algorithm 4).

    books: one per stage, `[codebooks, entries, size]`. Encoding is greedy, stage by stage.
    """

    books: list[Tensor]

    @classmethod
    def fit(cls, points: Tensor, stages: int, entries: int, iterations: int, seed: int) -> ResidualQuantizer:
        """Fit `stages` codebooks to `points` `[codebooks, points, size]`, each by k-means of the residuals so far."""
        books = []
        for _ in range(stages):
            books.append(_clustered(points, entries, iterations, seed))
            points = points - _lookup(books[-1], nearest(points, books[-1]))
        return cls(books)

    def encode(self, points: Tensor) -> list[Tensor]:
        """`points` `[codebooks, points, size]` -> per stage, the index of its centroid `[codebooks, points]`."""
        codes = []
        for book in self.books:
            codes.append(nearest(points, book))
            points = points - _lookup(book, codes[-1])
        return codes

    def decode(self, codes: list[Tensor]) -> Tensor:
        """The sum of the centroids, `[codebooks, points, size]`."""
        total = _lookup(self.books[0], codes[0])
        for book, code in zip(self.books[1:], codes[1:], strict=True):
            total = total + _lookup(book, code)
        return total


def mean_squared_error(quantizer: ProductQuantizer | ResidualQuantizer, points: Tensor) -> float:
    """The mean squared error of `points` `[codebooks, points, size]` after encoding and decoding."""
    return (quantizer.decode(quantizer.encode(points)) - points).square().mean(dtype=torch.float64).item()


@register
@dataclass(frozen=True)
class Quantizers(ModelStudy):
    """Product against residual quantization of vectors of adjacent tokens of a channel, with two 8-bit codes each.

    layers: how many layers. codebooks: how many codebooks of a layer's keys or values. points: the most vectors that a
    codebook is clustered from. entries: centroids of a codebook. skip: first tokens of a window to leave out.
    """

    name = "quantizers"
    source = "TemporalKV Table 1"
    samples = 10

    layers: int = 5
    codebooks: int = 4
    points: int = 8192
    entries: int = 256
    iterations: int = 50
    skip: int = 8

    def __post_init__(self) -> None:
        if min(self.layers, self.codebooks, self.iterations) < 1 or self.entries < 2 or self.skip < 0:
            raise UsageError("study quantizers: layers, codebooks and iterations must be at least 1, entries 2, skip 0")
        if self.points < self.entries:
            raise UsageError(f"study quantizers: points={self.points} must be at least entries={self.entries}")

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`."""
        held_out, vectors = max(1, data.samples // 5), self._vectors(data)
        if vectors < self.entries:
            raise UsageError(
                f"study quantizers: {data.samples} windows of {data.seqlen} tokens, {held_out} of them held out, "
                f"give {max(0, vectors)} vectors, too few for {self.entries} centroids: raise --samples or --seqlen"
            )
        layers = spread(len(data.loaded.shape.cached_layers), self.layers)
        jobs = [(dim, layer, kind) for layer in layers for kind in STREAMS for dim in _DIMS]
        errors: dict[tuple[int, int, str], tuple[float, float]] = {}
        with captured(data.loaded, data.windows, progress, layers=layers, skip=self.skip) as activations:

            def measure(job: tuple[int, int, str]) -> None:
                errors[job] = self._errors(activations, job, held_out, data.seed)

            clustered(measure, jobs, data.loaded.model.device, progress)
        return self._findings(data, layers, errors, held_out)

    def _errors(
        self, activations: Activations, job: tuple[int, int, str], held_out: int, seed: int
    ) -> tuple[float, float]:
        """Mean squared errors of product and of residual quantization, for vectors of held-out windows."""
        dim, layer, kind = job
        x = activations.x(layer, kind)
        x = x[:, : x.shape[1] // dim * dim]
        mean, std = mean_std(x[:-held_out])
        u = (x.float() - mean) / torch.where(std > 0, std, 1.0)
        shape, share = BlockShape("temporal", dim, 1), _share(dim, x.shape[3])
        blocks = [to_blocks(part, shape, share) for part in (u[:-held_out], u[-held_out:])]
        chosen = spread(len(blocks[0]), self.codebooks)
        training, held = (part[chosen] for part in blocks)
        training, _ = draw_coreset(training, training.new_ones(training.shape[:2]), self.points, seed)
        product = ProductQuantizer.fit(training, _STAGES, self.entries, self.iterations, seed)
        residual = ResidualQuantizer.fit(training, _STAGES, self.entries, self.iterations, seed)
        return mean_squared_error(product, held), mean_squared_error(residual, held)

    def _vectors(self, data: StudyInput) -> int:
        """How many vectors a codebook can be clustered from, at the size of vector that has fewest."""
        windows = data.samples - max(1, data.samples // 5)
        tokens, head_dim = data.seqlen - self.skip, data.loaded.shape.head_dim
        return min(windows * (tokens // dim) * _share(dim, head_dim) for dim in _DIMS)

    def _findings(self, data: StudyInput, layers: list[int], errors: dict, held_out: int) -> Findings:
        more = {key: round(residual / product - 1, 5) for key, (product, residual) in errors.items()}
        rows = [
            [dim, name, *(100 * more[dim, layer, kind] for layer in layers)]
            for dim in _DIMS
            for kind, name in STREAMS.items()
        ]
        numbers: dict[str, Any] = {"layers": layers, "sizes": _DIMS}
        for index, name in enumerate(("product", "residual")):
            numbers[name] = {
                stream: [[errors[dim, layer, kind][index] for layer in layers] for dim in _DIMS]
                for kind, stream in STREAMS.items()
            }
        return Findings(
            ["size", "numbers", *(f"layer {layer}" for layer in layers)],
            rows,
            numbers,
            lambda figure: _draw(figure, rows, layers),
            (11, 4.5),
            [
                "Mean squared error of residual quantization over that of product quantization, in % more, measured on "
                f"{held_out} held-out windows; vectors of 'size' adjacent tokens of a channel, "
                f"normalized by channel, in {_STAGES} codes of {self.entries} centroids each; "
                f"{self.codebooks} codebooks of a layer's keys or values, clustered from "
                f"{min(self.points, self._vectors(data))} vectors each."
            ],
        )


def _share(dim: int, head_dim: int) -> int:
    """How many channels share a codebook: as many as a vector has numbers, if that divides a head, so that a codebook
    is clustered from one vector per token."""
    return math.gcd(dim, head_dim)


def _clustered(points: Tensor, entries: int, iterations: int, seed: int) -> Tensor:
    points = points.contiguous()
    weights = points.new_ones(points.shape[:2])
    return weighted_kmeans(points, weights, entries, iterations=iterations, seed=seed)


def _lookup(book: Tensor, codes: Tensor) -> Tensor:
    """The centroids `[codebooks, points, size]` with the indices `codes` `[codebooks, points]`."""
    return book.gather(1, codes[..., None].expand(-1, -1, book.shape[2]))


def _draw(figure: Figure, rows: list[list], layers: list[int]) -> None:
    axes = figure.subplots(1, len(STREAMS), sharey=True)
    for axis, name in zip(axes, STREAMS.values(), strict=True):
        for dim, stream, *more in rows:
            if stream == name:
                axis.plot(layers, more, "o-", label=f"vectors of {dim}")
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set(title=name, xlabel="layer", xticks=layers)
    axes[0].set_ylabel("more error of residual than of\nproduct quantization, %")
    axes[0].legend()
