"""Calibrate the codebooks of one stream (keys or values of a layer): cluster every candidate block shape, measure it on
held-out samples, choose the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_cli.calibration.blocks import block_sums, draw_coreset, to_blocks
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.kmeans import nearest, weighted_kmeans
from kvq_cli.calibration.rotations import rotate_stream
from kvq_cli.calibration.statistics import adjacent_correlation, mean_std, outlier_thresholds
from kvq_cli.codecs import per_token
from kvq_cli.codecs.base import side_dtype
from kvq_cli.methods.codebooks import ENTRIES
from kvq_cli.methods.specs import BlockShape, CodebookSpec

ERROR_MEASURE = (
    "on held-out samples, relative to the spread around each channel's mean; fisher: squared errors weighted with "
    "squared gradients; plain: without weights"
)


def calibrate_stream(
    captured: CapturedStream, spec: CodebookSpec, settings: ClusterSettings
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Codebooks and statistics of a stream: tensors (`centroids.<shape>`, `choice`, `mean`, `std`, `lower`, `upper`),
    and their errors as plain JSON values; with `rotation` "opq" also `rotation` and `spread`.

    Errors are measured on the held-out samples with centroids in their stored dtype: "fisher" is
    sum g^2 (x - x')^2 / sum g^2 (x - mean)^2, comparable between shapes and predictive of the loss; "plain" is the same
    without g^2. Of a rotated stream, channels are those after the rotation. The shape with the lowest "fisher"
    error is chosen.
    """
    rotated, rotation = rotate_stream(captured, spec, settings)
    stream = _prepare(rotated, spec, settings.dtype)
    codebooks = [_cluster(stream, shape, spec, settings) for shape in spec.shapes]
    errors = torch.stack(
        [
            _held_out_errors(stream, shape, spec.share, centroids)
            for shape, centroids in zip(spec.shapes, codebooks, strict=True)
        ]
    ).cpu()  # [shapes, 2, kv_heads]
    choice = choose_shapes(errors[:, 0], settings.hybrid)
    tensors = {"choice": choice.to(torch.int8), **stream.constants, **rotation}
    for i, (shape, centroids) in enumerate(zip(spec.shapes, codebooks, strict=True)):
        if (heads := choice == i).any():
            tensors[f"centroids.{shape.name}"] = centroids if spec.across_heads else centroids[heads]
    return tensors, _error_report(stream, spec.shapes, errors, choice)


def choose_shapes(errors: Tensor, hybrid: str) -> Tensor:
    """Index of the block shape with the lowest error, for each kv head: int64 `[kv_heads]`.

    errors: `[shapes, kv_heads]`. hybrid: "head" chooses per head, "layer" one shape for all heads, "off" the first.
    """
    if hybrid == "head":
        return errors.argmin(0)
    return torch.full((errors.shape[1],), int(errors.sum(1).argmin()) if hybrid == "layer" else 0)


@dataclass(frozen=True)
class _PreparedStream:
    """A normalized stream, `[samples, tokens, kv_heads, head_dim]` float32.

    u, weights:       training samples, outliers moved to their threshold, and the squared gradient of each number with
                      respect to u, 0 of outliers.
    inlier:           False for the outliers of the training samples.
    held_out:         u of the held-out samples.
    held_out_weights: "fisher" and "plain" weights of the held-out samples, `[2, samples, ...]`.
    center:           the mean in units of u, `[kv_heads, head_dim]`, or per held-out token.
    constants:        per-channel tensors that the artifact stores.
    """

    u: Tensor
    weights: Tensor
    inlier: Tensor
    held_out: Tensor
    held_out_weights: Tensor
    center: Tensor
    constants: dict[str, Tensor]
    correlation: float


def _prepare(captured: CapturedStream, spec: CodebookSpec, dtype: torch.dtype) -> _PreparedStream:
    training, not_held_out = captured.training, captured.not_held_out
    mean, std = mean_std(not_held_out)
    x = captured.x[: len(captured.g)].float()
    if spec.per_token:
        normalized = _normalize_per_token(x, spec, dtype)
    else:
        normalized = _normalize_per_channel(x, spec, not_held_out, mean, std)
    shift, scale = normalized.shift, normalized.scale
    # A squared error of u counts scale^2 times as an error of x; outliers, which are stored exactly, count nothing.
    weights = captured.g.to(torch.float32, copy=True).mul_(scale).square_().mul_(normalized.inlier)
    plain = torch.ones_like(x[training:]).mul_(scale[training:] if spec.per_token else scale).square_()
    u = (normalized.x - shift).div_(scale)
    center = (mean - shift) / scale
    return _PreparedStream(
        u=u[:training],
        weights=weights[:training],
        inlier=normalized.inlier[:training],
        held_out=u[training:],
        held_out_weights=torch.stack([weights[training:], plain.mul_(normalized.inlier[training:])]),
        center=center[training:] if spec.per_token else center,
        constants=normalized.constants,
        correlation=adjacent_correlation(not_held_out, mean, std),
    )


@dataclass(frozen=True)
class _Normalization:
    """u = (x - shift) / scale. `inlier` is False for outliers, which `x` has moved to their threshold."""

    x: Tensor
    inlier: Tensor
    shift: Tensor
    scale: Tensor
    constants: dict[str, Tensor]


def _normalize_per_channel(
    x: Tensor, spec: CodebookSpec, statistics: Tensor, mean: Tensor, std: Tensor
) -> _Normalization:
    """Normalize by constants of each channel. statistics: the samples that outlier thresholds are computed from."""
    constants: dict[str, Tensor] = {}
    lower, upper = mean, mean
    if spec.outliers or spec.by_range:
        lower, upper = outlier_thresholds(statistics, spec.outliers)
    shift, scale = torch.zeros_like(mean), torch.ones_like(std)
    if spec.normalize:
        shift, scale = ((lower + upper) / 2, (upper - lower) / 2) if spec.by_range else (mean, std)
        constants |= {"mean": shift, "std": scale}
        scale = torch.where(scale > 0, scale, 1.0)
    if not spec.outliers:
        return _Normalization(x, torch.ones_like(x, dtype=torch.bool), shift, scale, constants)
    constants |= {"lower": lower, "upper": upper}
    return _Normalization(x.clamp(lower, upper), (x >= lower) & (x <= upper), shift, scale, constants)


def _normalize_per_token(x: Tensor, spec: CodebookSpec, dtype: torch.dtype) -> _Normalization:
    """Normalize each token by its range, as `PerTokenCodec` does online: no constants."""
    rows = x.flatten(2)
    inner, index = per_token.split_outliers(rows, spec.outliers)
    inlier = torch.ones_like(rows, dtype=torch.bool).scatter_(-1, index, False)
    zero, scale = per_token.ranges(inner, side_dtype(dtype))
    shift, divisor = zero.float()[..., None], per_token.divisor(scale)[..., None]
    return _Normalization(inner.view_as(x), inlier.view_as(x), shift, divisor, {})


def _cluster(stream: _PreparedStream, shape: BlockShape, spec: CodebookSpec, settings: ClusterSettings) -> Tensor:
    """Centroids `[kv_heads or 1, head_dim / share, entries, l * c]` in their stored dtype."""
    points = to_blocks(stream.u, shape, spec.share)
    inliers = block_sums(stream.inlier, shape, spec.share).float() / shape.size  # outliers, stored exactly, weigh 0
    if settings.fisher:
        weights = block_sums(stream.weights, shape, spec.share)  # Eq. 3: the sum of a block's squared gradients
        weights = weights + settings.damping * weights.mean(-1, keepdim=True) * inliers
    else:
        weights = inliers
    heads = stream.u.shape[2]
    if spec.across_heads:
        points, weights = (x.unflatten(0, (heads, -1)).transpose(0, 1).flatten(1, 2) for x in (points, weights))
    count = settings.points * max(1, spec.entries // ENTRIES)
    points, weights = draw_coreset(points, weights, count, settings.seed)
    centroids = weighted_kmeans(
        points,
        weights,
        spec.entries,
        iterations=settings.iterations,
        seed=settings.seed,
        engine=settings.engine,
    )
    return centroids.to(settings.dtype).unflatten(0, (1 if spec.across_heads else heads, -1))


def _held_out_errors(stream: _PreparedStream, shape: BlockShape, share: int, centroids: Tensor) -> Tensor:
    """Weighted squared errors on the held-out samples, `[2 (fisher, plain), kv_heads]` float64."""
    blocks, heads = to_blocks(stream.held_out, shape, share), stream.held_out.shape[2]
    centroids = centroids.expand(heads, *centroids.shape[1:]).flatten(0, 1).float()
    codes = nearest(blocks, centroids)
    squares = (blocks - centroids.gather(1, codes[..., None].expand_as(blocks))).square()
    return torch.stack([_sum_per_head(squares * to_blocks(w, shape, share), heads) for w in stream.held_out_weights])


def _sum_per_head(blocks: Tensor, heads: int) -> Tensor:
    return blocks.double().unflatten(0, (heads, -1)).sum((1, 2, 3))


def _error_report(
    stream: _PreparedStream, shapes: tuple[BlockShape, ...], errors: Tensor, choice: Tensor
) -> dict[str, Any]:
    """The stream's entry of the artifact's `errors`: JSON values with six significant digits."""
    squares = stream.held_out_weights * (stream.held_out - stream.center).square()
    spread = squares.double().sum((1, 2, 4)).cpu()  # [2, kv_heads]

    def entry(errors: Tensor) -> dict[str, Any]:
        fisher, plain = relative(errors.sum(1), spread.sum(1)).tolist()
        heads = relative(errors[0], spread[0]).tolist()
        return {"fisher": rounded(fisher), "plain": rounded(plain), "fisher_per_head": [rounded(h) for h in heads]}

    chosen = errors[choice, :, torch.arange(len(choice))].T  # [2, kv_heads]
    return {
        "choice": [shapes[i].name for i in choice.tolist()],
        "chosen": entry(chosen),
        "shapes": {shape.name: entry(errors[i]) for i, shape in enumerate(shapes)},
        "adjacent_token_correlation": rounded(stream.correlation),
    }


def relative(error: Tensor, spread: Tensor) -> Tensor:
    """error / spread, element by element; 0 where the spread is 0, as of a head that is constant."""
    return torch.where(spread > 0, error / spread, 0.0)


def rounded(number: float) -> float:
    """The number with six significant digits."""
    return float(f"{number:.6g}")
