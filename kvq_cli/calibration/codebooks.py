"""The codebooks of one stream of one layer: cluster each candidate shape, measure it on held-out data, choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.calibration.blocks import block_sums, draw_coreset, to_blocks
from kvq_cli.calibration.kmeans import Engine, nearest, weighted_kmeans
from kvq_cli.calibration.statistics import adjacent_correlation, mean_std, outlier_thresholds
from kvq_cli.codecs import per_token
from kvq_cli.codecs.base import side_dtype
from kvq_cli.methods.base import BlockShape, CodebookSpec

ERROR_MEASURE = (
    "on held-out samples, relative to the spread around each channel's mean; fisher: squared errors weighted with "
    "squared gradients; plain: without weights"
)


@dataclass(frozen=True)
class CapturedStream:
    """One stream of one layer, `[samples, tokens, kv_heads, head_dim]` bfloat16.

    x: activations of all samples, those with gradients first.
    g: gradients of the first `len(g)` samples, of which the last `held_out` are held out.
    """

    x: Tensor
    g: Tensor
    held_out: int


@dataclass(frozen=True)
class ClusterSettings:
    """How to cluster. hybrid: "layer", "head" or "off"; dtype: what centroids are stored in; damping: see Settings."""

    fisher: bool
    hybrid: str
    points: int
    iterations: int
    seed: int
    dtype: torch.dtype
    damping: float = 0.0
    engine: Engine = "auto"


def calibrate_stream(
    captured: CapturedStream, spec: CodebookSpec, recipe: ClusterSettings
) -> tuple[dict[str, Tensor], dict]:
    """Tensors of the stream (`centroids.<shape>`, `choice`, `mean`, `std`, `lower`, `upper`) and what was measured.

    Errors are measured on the held-out samples, with centroids as stored, number by number: "fisher" is
    sum g^2 (x - x')^2 / sum g^2 (x - mean)^2, which is comparable between shapes and is what raises the loss; "plain"
    is the same without g^2. The shape with the least "fisher" is chosen.
    """
    stream = _prepare(captured, spec, recipe.dtype)
    books = [_cluster(stream, shape, spec, recipe) for shape in spec.shapes]
    lost = [_lost(stream, shape, spec.share, book) for shape, book in zip(spec.shapes, books, strict=True)]
    lost = torch.stack(lost).cpu()  # [shapes, 2, kv_heads]
    choice = choose_shapes(lost[:, 0], recipe.hybrid)
    tensors = {"choice": choice.to(torch.int8), **stream.constants}
    for i, (shape, book) in enumerate(zip(spec.shapes, books, strict=True)):
        if (heads := choice == i).any():
            tensors[f"centroids.{shape.name}"] = book if spec.across_heads else book[heads]
    return tensors, _measured(stream, spec.shapes, lost, choice)


def choose_shapes(lost: Tensor, hybrid: str) -> Tensor:
    """The index of the shape that loses least, for all heads together or for each: lost `[shapes, kv_heads]`."""
    heads = lost.shape[1]
    if hybrid == "head":
        return lost.argmin(0)
    return torch.full((heads,), int(lost.sum(1).argmin()) if hybrid == "layer" else 0)


@dataclass(frozen=True)
class _Stream:
    """One stream ready to be clustered, `[samples, tokens, kv_heads, head_dim]` float32.

    u, e:     training numbers, normalized and without outliers, and the Fisher weight of each.
    held_u:   the same of the held-out samples. held_weights: "fisher" and "plain" `[2, samples, ...]`.
    center:   the mean, in units of u, of the held-out samples or of all, `[kv_heads, head_dim]`.
    """

    u: Tensor
    e: Tensor
    held_u: Tensor
    held_weights: Tensor
    center: Tensor
    constants: dict[str, Tensor]
    correlation: float


def _prepare(captured: CapturedStream, spec: CodebookSpec, dtype: torch.dtype) -> _Stream:
    gradients = len(captured.g)
    training = gradients - captured.held_out
    seen = torch.cat([captured.x[:training], captured.x[gradients:]])  # statistics do not see what is held out either
    mean, std = mean_std(seen)
    x = captured.x[:gradients].float()
    scaled = _by_token(x, spec, dtype) if spec.per_token else _by_channel(x, spec, seen, mean, std)
    shift, scale = scaled.shift, scaled.scale
    # A squared error of u is worth scale^2 of x; outliers, which are stored exactly, are worth nothing.
    weights = torch.stack([captured.g.float(), torch.ones_like(x)]).mul_(scale).square_().mul_(scaled.inside)
    u = (scaled.x - shift) / scale
    center = (mean - shift) / scale
    return _Stream(
        u=u[:training],
        e=weights[0, :training],
        held_u=u[training:],
        held_weights=weights[:, training:],
        center=center[training:] if spec.per_token else center,
        constants=scaled.constants,
        correlation=adjacent_correlation(seen, mean, std),
    )


@dataclass(frozen=True)
class _Scaled:
    """How numbers are normalized: u = (x - shift) / scale; `inside` is false for outliers, which `x` has moved."""

    x: Tensor
    inside: Tensor
    shift: Tensor
    scale: Tensor
    constants: dict[str, Tensor]


def _by_channel(x: Tensor, spec: CodebookSpec, seen: Tensor, mean: Tensor, std: Tensor) -> _Scaled:
    """With constants of each channel, found on all numbers that were seen."""
    constants = {}
    lower, upper = outlier_thresholds(seen, spec.outliers) if spec.outliers or spec.by_range else (None, None)
    shift, scale = torch.zeros_like(mean), torch.ones_like(std)
    if spec.normalize:
        shift, scale = ((lower + upper) / 2, (upper - lower) / 2) if spec.by_range else (mean, std)
        constants |= {"mean": shift, "std": scale}
        scale = torch.where(scale > 0, scale, 1.0)
    if not spec.outliers:
        return _Scaled(x, torch.ones_like(x, dtype=torch.bool), shift, scale, constants)
    constants |= {"lower": lower, "upper": upper}
    return _Scaled(x.clamp(lower, upper), (x >= lower) & (x <= upper), shift, scale, constants)


def _by_token(x: Tensor, spec: CodebookSpec, dtype: torch.dtype) -> _Scaled:
    """As the codec will find it online, from the numbers of each token: nothing to keep."""
    rows = x.flatten(2)
    inner, index = per_token.split_outliers(rows, spec.outliers)
    inside = torch.ones_like(rows, dtype=torch.bool).scatter_(-1, index, False)
    zero, scale = per_token.ranges(inner, side_dtype(dtype))
    shift, scale = (x[..., None] for x in (zero.float(), per_token.divisor(scale)))
    return _Scaled(inner.view_as(x), inside.view_as(x), shift, scale, {})


def _cluster(stream: _Stream, shape: BlockShape, spec: CodebookSpec, recipe: ClusterSettings) -> Tensor:
    """Codebooks `[kv_heads or 1, head_dim / share, entries, l * c]` in the dtype that they are stored in."""
    points = to_blocks(stream.u, shape, spec.share)
    weights = block_sums(stream.e, shape, spec.share)  # Eq. 3: a block weighs the sum of its squared gradients
    weights = weights + recipe.damping * weights.mean(-1, keepdim=True) if recipe.fisher else torch.ones_like(weights)
    heads = stream.u.shape[2]
    if spec.across_heads:
        points, weights = (x.unflatten(0, (heads, -1)).transpose(0, 1).flatten(1, 2) for x in (points, weights))
    points, weights = draw_coreset(points, weights, recipe.points, recipe.seed)
    iterations, seed, engine = recipe.iterations, recipe.seed, recipe.engine
    books = weighted_kmeans(points, weights, spec.entries, iterations=iterations, seed=seed, engine=engine)
    return books.to(recipe.dtype).unflatten(0, (1 if spec.across_heads else heads, -1))


def _lost(stream: _Stream, shape: BlockShape, share: int, books: Tensor) -> Tensor:
    """Weighted squared errors of the held-out numbers, `[2 (fisher, plain), kv_heads]` float64."""
    blocks, heads = to_blocks(stream.held_u, shape, share), stream.held_u.shape[2]
    centroids = books.expand(heads, *books.shape[1:]).flatten(0, 1).float()
    codes = nearest(blocks, centroids)
    squares = (blocks - centroids.gather(1, codes[..., None].expand_as(blocks))).square()
    return torch.stack([_per_head(squares * to_blocks(w, shape, share), heads) for w in stream.held_weights])


def _per_head(blocks: Tensor, heads: int) -> Tensor:
    return blocks.double().unflatten(0, (heads, -1)).sum((1, 2, 3))


def _measured(stream: _Stream, shapes: tuple[BlockShape, ...], lost: Tensor, choice: Tensor) -> dict:
    """The stream's entry of the artifact's `errors`, in plain numbers of six digits."""
    spread = (
        (stream.held_weights * (stream.held_u - stream.center).square()).double().sum((1, 2, 4)).cpu()
    )  # [2, kv_heads]

    def entry(lost: Tensor) -> dict:
        fisher, plain = (lost.sum(1) / spread.sum(1).clamp_min(1e-300)).tolist()
        heads = (lost[0] / spread[0].clamp_min(1e-300)).tolist()
        return {"fisher": _short(fisher), "plain": _short(plain), "fisher_per_head": [_short(h) for h in heads]}

    chosen = lost[choice, :, torch.arange(len(choice))].T  # [2, kv_heads]
    return {
        "choice": [shapes[i].name for i in choice.tolist()],
        "chosen": entry(chosen),
        "shapes": {shape.name: entry(lost[i]) for i, shape in enumerate(shapes)},
        "adjacent_token_correlation": _short(stream.correlation),
    }


def _short(number: float) -> float:
    return float(f"{number:.6g}")
