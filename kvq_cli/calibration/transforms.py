"""Calibrate the Karhunen-Loeve transforms of one stream (keys or values of a layer), and their codebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_cli.calibration.allocation import allocate
from kvq_cli.calibration.blocks import draw_coreset
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import relative, rounded
from kvq_cli.calibration.kmeans import weighted_kmeans
from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import TransformSpec

ERROR_MEASURE = (
    "on held-out samples, relative to the spread around each channel's mean; fisher: squared errors weighted with "
    "squared gradients; plain: without weights; loss: squared products of error and gradient of a token and group"
)
#: Share of the mean eigenvalue that is added to the Fisher matrix, so that directions without gradients keep a bound.
SHRINKAGE = 1e-3
#: Components of at most this variance are constant.
_CONSTANT = 1e-60
#: The mean squared gradient of a group without gradients: its components then cost less than those of all other groups,
#: and are not yet constant.
_NO_GRADIENT = 1e-30
#: Tokens of float64 statistics at a time.
_TILE = 4096


@dataclass(frozen=True)
class Transform:
    """The transforms of a stream, float64; G groups of W channels, components by descending variance.

    mean, std: `[G, W]`. analysis: `[G, W, W]`: z = analysis (x - mean). synthesis: its inverse. variances: of z,
    `[G, W]`, in units of the loss.
    """

    mean: Tensor
    std: Tensor
    analysis: Tensor
    synthesis: Tensor
    variances: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


def fit_transform(captured: CapturedStream, groups: int, metric: str) -> Transform:
    """Diagonalize the covariance of y = G^(1/2) (x - mean), where G is the Fisher matrix E[g g^T] of the training
    samples, its diagonal, or the identity (`metric`, see `TransformSpec`): z = U^T y. Mean and covariance are those of
    all samples that are not held out."""
    x, g = (_grouped(t, groups) for t in (captured.not_held_out, captured.g[: captured.training]))  # [G, N, W] bfloat16
    mean = torch.stack([each.double().mean(0) for each in x])
    covariance = _second_moment(x, mean)
    fisher = _second_moment(g, torch.zeros_like(mean))
    width = x.shape[2]
    identity = torch.eye(width, dtype=torch.float64, device=x.device).expand_as(fisher)
    scale = fisher.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    scale = torch.where(scale > 0, scale, _NO_GRADIENT)
    if metric == "none":
        fisher = identity * scale
    elif metric == "diagonal":
        fisher = fisher * identity
    fisher = fisher + SHRINKAGE * scale * identity
    values, vectors = torch.linalg.eigh(fisher)
    root = vectors @ (values.sqrt().unsqueeze(2) * vectors.mT)
    inverse = vectors @ (values.rsqrt().unsqueeze(2) * vectors.mT)
    variances, basis = torch.linalg.eigh(root @ covariance @ root)
    variances, basis = variances.flip(1).clamp_min(0), basis.flip(2)
    # The sign of an eigenvector is arbitrary: make its largest number positive, so that all libraries agree.
    basis = basis * basis.gather(1, basis.abs().argmax(dim=1, keepdim=True)).sign()
    std = covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    return Transform(mean, std, basis.mT @ root, inverse @ basis, variances)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`[samples, tokens, kv_heads, head_dim]` -> `[groups, samples * tokens, channels of a group]`."""
    return x.flatten(0, 1).flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)


def _second_moment(x: Tensor, center: Tensor) -> Tensor:
    """Mean of (x - center) (x - center)^T over tokens: `[G, N, W]` -> `[G, W, W]` float64."""
    tiles = ((tile.double() - center.unsqueeze(1)) for tile in x.split(_TILE, dim=1))
    total = torch.stack([tile.mT @ tile for tile in tiles]).sum(0)
    return total / x.shape[1]


def allocate_codes(
    variances: Mapping[tuple[int, str], Tensor], spec: TransformSpec, shape: ModelShape
) -> dict[tuple[int, str], list[list[int]]]:
    """The lengths of the chunks of each group, by stream. variances: of each stream (layer, kind), `[groups, W]`."""
    budget = spec.code_budget(shape)
    if spec.allocate == "stream":
        parts = [({stream: each}, budget // len(variances)) for stream, each in variances.items()]
    else:
        parts = [(dict(variances), budget)]
    lengths: dict[tuple[int, str], list[list[int]]] = {}
    for streams, codes in parts:
        rows = iter(allocate([row.numpy() for each in streams.values() for row in each], codes))
        lengths |= {stream: [next(rows) for _ in each] for stream, each in streams.items()}
    return lengths


def calibrate_transform(
    captured: CapturedStream, transform: Transform, lengths: Sequence[Sequence[int]], settings: ClusterSettings
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Codebooks of a stream's components: tensors as in `transform_layout`, and errors as plain JSON values.

    lengths: of the chunks of each group, in the order of its components. Errors are measured on the held-out samples
    with tensors as stored.
    """
    groups, width = transform.mean.shape
    kept = max(sum(row) for row in lengths)
    analysis = torch.zeros(groups, kept, width, dtype=torch.float64, device=transform.mean.device)
    synthesis = torch.zeros_like(analysis).mT.contiguous()
    for group, row in enumerate(lengths):
        order, scale = _order_and_scale(transform.variances[group], row)
        analysis[group, : len(order)] = transform.analysis[group, order] / scale.unsqueeze(1)
        synthesis[group, :, : len(order)] = transform.synthesis[group][:, order] * scale
    allocation = [[sum(length == size for length in row) for size in CHUNKS] for row in lengths]
    tensors = {
        "allocation": torch.tensor(allocation, dtype=torch.int16),
        "mean": transform.mean.float(),
        "std": transform.std.float(),
        "analysis": analysis.float(),
        "synthesis": synthesis.float(),
    }
    x, g = (_grouped(t[: captured.training], groups).float() for t in (captured.x, captured.g))
    z = (x - tensors["mean"].unsqueeze(1)) @ tensors["analysis"].mT  # [G, N, K]
    weights = (g @ tensors["synthesis"]).square_()  # squared gradients to the components
    centroids = _cluster(z, weights, allocation, settings)
    tensors |= {f"centroids.{size}": books for size, books in centroids.items()}
    codec = TransformCodec(captured.x.shape[2], tensors)
    return tensors, {"codes": codec.codes, "chosen": held_out_errors(captured, codec, groups)}


def _order_and_scale(variances: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(components by chunk length, short chunks first; divisor of each, which gives a chunk the mean variance 1)."""
    chunks, first = [], 0
    for length in lengths:
        chunks.append(range(first, first + length))
        first += length
    chunks.sort(key=len)
    means = torch.stack([variances[chunk.start : chunk.stop].mean() for chunk in chunks])
    # Constant components, as those of a head that is always zero, stay as they are: their factor has no bound.
    scales = torch.where(means > _CONSTANT, means, 1.0).sqrt()
    scales = scales.repeat_interleave(torch.tensor([len(chunk) for chunk in chunks], device=scales.device))
    order = torch.tensor([component for chunk in chunks for component in chunk], device=variances.device)
    return order, scales


def _cluster(
    z: Tensor, weights: Tensor, allocation: Sequence[Sequence[int]], settings: ClusterSettings
) -> dict[int, Tensor]:
    """Codebooks by chunk length, `[chunks of all groups, 256, length]`. z, weights: `[G, N, K]`."""
    starts = [0] * len(allocation)
    centroids = {}
    for column, size in enumerate(CHUNKS):
        points, masses = [], []
        for group, row in enumerate(allocation):
            first = starts[group]
            starts[group] = last = first + size * row[column]
            points.append(z[group, :, first:last].unflatten(1, (-1, size)).transpose(0, 1))
            masses.append(weights[group, :, first:last].unflatten(1, (-1, size)).sum(2).T)
        blocks, mass = torch.cat(points), torch.cat(masses)
        if len(blocks):
            centroids[size] = _codebooks(blocks, mass, settings).to(settings.dtype)
    return centroids


def _codebooks(blocks: Tensor, weights: Tensor, settings: ClusterSettings) -> Tensor:
    """`[codebooks, points, size]`, weights `[codebooks, points]` -> `[codebooks, 256, size]`."""
    if settings.fisher:
        weights = weights + settings.damping * weights.mean(-1, keepdim=True)
    else:
        weights = torch.ones_like(weights)
    points, weights = draw_coreset(blocks.contiguous(), weights.contiguous(), settings.points, settings.seed)
    return weighted_kmeans(
        points,
        weights,
        MAX_ENTRIES,
        iterations=settings.iterations,
        seed=settings.seed,
        engine=settings.engine,
    )


def held_out_errors(captured: CapturedStream, codec: Codec, groups: int) -> dict[str, Any]:
    """Errors of a codec on the held-out samples, as plain JSON values; see `ERROR_MEASURE`. "loss" sums the products of
    error and gradient within each of `groups` groups of heads."""
    tokens = captured.x.shape[1] // codec.block_tokens * codec.block_tokens
    held_out = slice(captured.training, len(captured.g))
    x, g = (t[held_out, :tokens].float().transpose(1, 2) for t in (captured.x, captured.g))  # [S, H, T, D]
    mean = torch.stack([each.double().mean(0) for each in _grouped(captured.not_held_out, len(x[0]))])  # [H, D]
    lost = codec.decode(codec.encode(x), torch.float32) - x
    spread = x - mean.float().unsqueeze(1)

    def loss(error: Tensor) -> Tensor:
        return (error * g).unflatten(1, (groups, -1)).sum((2, 4)).double().square().sum()

    def ratio(error: Tensor, whole: Tensor) -> float:
        return rounded(relative(error.sum(), whole.sum()).item())

    weighted, whole = ((each * g).double().square().sum((0, 2, 3)) for each in (lost, spread))
    return {
        "fisher": ratio(weighted, whole),
        "plain": ratio(lost.double().square(), spread.double().square()),
        "loss": ratio(loss(lost), loss(spread)),
        "fisher_per_head": [ratio(one, all_) for one, all_ in zip(weighted, whole, strict=True)],
    }
