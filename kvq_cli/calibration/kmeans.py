"""Weighted k-means for many small codebooks.

On a CPU, codebooks are clustered one by one in batched torch, so that each stays in a core's cache (the caller may run
several streams in parallel); on a GPU, many go through each step together, with kernels for nearest centroids and
cluster sums. `kmeans_faiss` is the second engine; on a CPU its iterations take a third to a half of the time for 8192
points and 256 centroids, a quarter for 32768 points and 4096 centroids.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvq_cli.calibration.blocks import draw_coreset
from kvq_cli.calibration.kmeans_scalar import scalar_kmeans
from kvq_cli.codecs import kernels
from kvq_cli.codecs.nearest import LARGE_ENTRIES, grid_max, grid_scale, ranked
from kvq_cli.codecs.nearest import nearest as encoded
from kvq_cli.errors import KvqError
from kvq_cli.extras import install_command

#: Raise it with every change of what centroids the same points give: artifacts and results made before are then of an
#: earlier version.
VERSION = 2

#: The engine of the Lloyd iterations: this module, faiss, or "auto", by the size of the codebook.
Engine = Literal["auto", "kvq", "faiss"]
#: The largest codebook that "auto" clusters here: above, an index would take over ten bits of a score (see `_nearest`).
MAX_KVQ_ENTRIES = 1024

#: The largest codebook that begins with k-means++, which takes a step over all points for each centroid; larger ones
#: begin with points drawn by their weight, and are clustered by faiss alone.
MAX_SEEDED_ENTRIES = 1 << 13

#: Points per centroid among which k-means++ draws, and its tries per centroid (greedy k-means++). More points, more
#: tries and a lower tolerance lower the error of the training points by about 1%, but not that of held-out text
#: (SmolLM2-135M), and take up to twice as long. With 8 points the test of heavy-tailed data fails.
_SEED_POINTS, _TRIES = 16, 3
_TILE_CPU, _TILE = 1 << 17, 1 << 26  # scores held at a time: within a core's cache, or a GPU's memory


def weighted_kmeans(
    points: Tensor,
    weights: Tensor,
    entries: int,
    *,
    iterations: int = 50,
    tolerance: float = 5e-3,
    seed: int = 0,
    engine: Engine = "auto",
) -> Tensor:
    """Minimize sum_i w_i ||u_i - c_assign(i)||^2 (Eq. 3) for each codebook: k-means++, then Lloyd iterations.

    k-means++ draws among a coreset of the points. Codebooks of more than `MAX_SEEDED_ENTRIES` begin with points drawn
    in proportion to their weights. Codebooks of scalars are clustered by `kmeans_scalar` instead, unless faiss is
    requested.

    points:  `[codebooks, points, size]` float32, at least `entries` points. weights: `[codebooks, points]`, >= 0.
    A codebook stops after `iterations`, or when an iteration lowers its error by less than the fraction `tolerance`.
    Returns centroids `[codebooks, entries, size]` float32, deterministic for the same arguments and machine. Raises
    ValueError for fewer points than entries, KvqError where faiss is requested and not installed.
    """
    if points.shape[1] < entries:
        raise ValueError(f"{entries} centroids need as many points, not {points.shape[1]}")
    unweighted = weights.sum(-1, keepdim=True) == 0
    weights = torch.where(unweighted, torch.ones_like(weights), weights)
    if points.shape[2] == 1 and engine != "faiss":
        return scalar_kmeans(points.squeeze(2), weights, entries, iterations).unsqueeze(2)
    center = (points * weights[..., None]).sum(1, keepdim=True, dtype=torch.float64)
    center = (center / weights.sum(-1, dtype=torch.float64).view(-1, 1, 1)).float()
    points = points - center  # far from 0, scores of `_nearest` and sums of squares would lose the distances
    generator = torch.Generator().manual_seed(seed)
    seed_batch, lloyd_batch = _batch_sizes(len(points), points.shape[1], entries, points.device.type)
    if entries > MAX_SEEDED_ENTRIES:
        starts = _drawn(points, weights, entries, generator)
    else:
        draws = torch.rand(points.shape[0], entries, _TRIES, generator=generator, dtype=torch.float32).to(points.device)
        few = draw_coreset(points, weights, _SEED_POINTS * entries, seed)
        starts = torch.cat([kmeans_plus_plus(p, w, d) for p, w, d in _batches(seed_batch, *few, draws)])
    if choose_engine(engine, entries) == "faiss":
        from kvq_cli.calibration.kmeans_faiss import lloyd_faiss

        return lloyd_faiss(points, weights, starts, iterations, tolerance) + center
    centroids = [lloyd(p, w, c, iterations, tolerance) for p, w, c in _batches(lloyd_batch, points, weights, starts)]
    return torch.cat(centroids) + center


def choose_engine(engine: Engine, entries: int) -> Literal["kvq", "faiss"]:
    """The engine for codebooks of `entries` centroids: "auto" is faiss above `MAX_KVQ_ENTRIES` if it is installed.

    Does not import faiss. Raises KvqError where faiss is requested or needed and not installed.
    """
    needed = entries > MAX_SEEDED_ENTRIES
    if not needed and (engine == "kvq" or (engine == "auto" and entries <= MAX_KVQ_ENTRIES)):
        return "kvq"
    if find_spec("faiss") is not None:
        return "faiss"
    if needed or engine == "faiss":
        what = f"a codebook of {entries:,} entries" if needed else "--kmeans faiss"
        raise KvqError(
            f"{what} needs the package faiss, which is not installed: {install_command('faiss', 'faiss-gpu')}; "
            "faiss-gpu is for machines with a CUDA GPU"
        )
    return "kvq"


def _batch_sizes(codebooks: int, points: int, entries: int, device: str) -> tuple[int, int]:
    """Codebooks per batch of k-means++ and of Lloyd iterations. points: of one codebook.

    k-means++ is many short steps: batches amortize their overhead even on a CPU, as far as a step's arrays stay in a
    core's cache.
    """
    if device == "cpu":
        return max(1, 2048 // entries), 1
    size = max(1, min(codebooks, _TILE // (points * entries)))
    return size, size


def _batches(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _drawn(points: Tensor, weights: Tensor, entries: int, generator: torch.Generator) -> Tensor:
    """`[codebooks, entries, size]` different points, drawn in proportion to their weights: those with the largest
    ln(uniform) / weight (Efraimidis and Spirakis)."""
    keys = torch.rand(weights.shape, generator=generator, dtype=torch.float32).to(weights.device)
    keys.log_().div_(weights.clamp_min(1e-30))
    return points.gather(1, keys.topk(entries).indices[..., None].expand(-1, -1, points.shape[2]))


def kmeans_plus_plus(points: Tensor, weights: Tensor, draws: Tensor) -> Tensor:
    """Initial centroids `[codebooks, entries, size]`: points drawn with probability proportional to w_i D_i^2, of
    several tries the one that leaves the lowest error (greedy k-means++).

    Shapes as in `weighted_kmeans`; draws: `[codebooks, entries, tries]` uniform in [0, 1).
    """
    # ||u - c||^2 = (u, ||u||^2, 1) . (-2 c, 1, ||c||^2): one product makes the distances of all tries in one pass.
    norms = points.square().sum(-1, keepdim=True)
    expanded = torch.cat([points, norms, torch.ones_like(norms)], dim=-1).mT.contiguous()
    codebooks = torch.arange(points.shape[0], device=points.device)
    distance, mass = torch.full_like(weights, torch.inf), weights
    new = weights.new_empty(*draws.shape[::2], points.shape[1])  # [codebooks, tries, points]
    chosen = []
    for draw in draws.unbind(1):
        bounds = mass.cumsum(-1)
        # The last point at most: where all mass is 0, every point is a centroid already.
        tried = torch.searchsorted(bounds, draw * bounds[:, -1:], right=True).clamp_(max=points.shape[1] - 1)
        candidates = points.gather(1, tried.unsqueeze(2).expand(-1, -1, points.shape[2]))
        squares = candidates.square().sum(-1, keepdim=True)
        torch.bmm(torch.cat([-2 * candidates, torch.ones_like(squares), squares], dim=-1), expanded, out=new)
        torch.minimum(new, distance.unsqueeze(1), out=new)
        best = torch.bmm(new, weights.unsqueeze(2)).squeeze(2).argmin(1)
        chosen.append(candidates[codebooks, best])
        distance = new[codebooks, best].clamp_(min=0)
        mass = distance * weights
    return torch.stack(chosen, dim=1)


def lloyd(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Lloyd iterations from `centroids`, shapes as in `weighted_kmeans`; converged codebooks are not updated."""
    weighted = torch.cat([points * weights[..., None], weights[..., None]], dim=-1)
    norms = points.square().sum(-1)
    before = torch.full(points.shape[:1], torch.inf, dtype=torch.float64, device=points.device)
    active = torch.ones_like(before, dtype=torch.bool)
    for _ in range(iterations):
        scores, codes = _nearest(points, centroids)
        moved, error = _update(weighted, norms, scores, codes, centroids)
        centroids = torch.where(active[:, None, None], moved, centroids)
        active &= before - error > tolerance * error
        before = error
        if not active.any():
            break
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Index of each point's nearest centroid, int64 `[codebooks, points]`; as precise as `_nearest` around the mean of
    the centroids, and in codebooks that are too large for it as in encoding."""
    if (entries := centroids.shape[1]) > MAX_KVQ_ENTRIES:
        scale, most = grid_scale(centroids), grid_max(entries)
        blocks = (points * scale.view(-1, 1, 1)).round_().clamp_(-most, most)
        return encoded(blocks, ranked(centroids, scale)).long().bitwise_and_(LARGE_ENTRIES - 1)
    _, size = _batch_sizes(len(points), points.shape[1], centroids.shape[1], points.device.type)
    centers = centroids.mean(1, keepdim=True)
    return torch.cat([_nearest(p - m, c - m)[1] for p, c, m in _batches(size, points, centroids, centers)])


def _nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices of the nearest centroids by ||c||^2 / 2 - u.c (Eq. 4-5), `[codebooks, points]` each.

    Minimum and argmin take one pass: the centroid's index replaces the lowest bits of its score. So centroids whose
    scores differ by less than 2^-15 of their size count as equally near, which clustering tolerates where points lie
    around 0.
    """
    if (assigned := kernels.assign_centroids(points, centroids)) is not None:
        codes, best = assigned
        return best, codes
    codebooks, count, _ = points.shape
    entries = centroids.shape[1]
    mask = (1 << max(1, (entries - 1).bit_length())) - 1
    indices = torch.arange(entries, dtype=torch.int32, device=points.device)[:, None]
    half_norms = centroids.square().sum(-1, keepdim=True) / 2
    best = points.new_empty(codebooks, count)
    tile = max(64, (_TILE_CPU if points.device.type == "cpu" else _TILE) // (codebooks * entries))
    for start in range(0, count, tile):
        part = points[:, start : start + tile].transpose(1, 2)
        scores = torch.baddbmm(half_norms, centroids, part, alpha=-1)  # [codebooks, entries, tile]
        scores.view(torch.int32).bitwise_and_(~mask).bitwise_or_(indices)
        best[:, start : start + tile] = scores.amin(1)
    return best, (best.view(torch.int32) & mask).long()


def _update(weighted: Tensor, norms: Tensor, scores: Tensor, codes: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means of the clusters, and their error: sum w ||u||^2 - sum_j W_j ||c_j||^2.

    The centroid of a cluster without weight moves to one of the points with the largest error.
    """
    sums = _sums_by_code(weighted, codes, centroids.shape[1])
    mass = sums[..., -1:]
    means = sums[..., :-1] / mass.clamp_min(1e-300)
    weights = weighted[..., -1]
    error = (weights * norms).sum(-1, dtype=torch.float64) - (mass * means.square()).sum((1, 2))
    moved = torch.where(mass > 0, means.float(), centroids)
    empty = mass.squeeze(-1) <= 0
    if most := int(empty.sum(-1).max()):
        worst = (weights * (norms + 2 * scores)).topk(most).indices  # [codebooks, most]
        rank = (empty.cumsum(-1) - 1).clamp_min(0)  # 0, 1, ... among the empty clusters of a codebook
        points = weighted[..., :-1] / weights[..., None].clamp_min(1e-38)
        source = worst.gather(1, rank.clamp_max(most - 1))
        worst_points = points.gather(1, source[..., None].expand_as(centroids))
        moved = torch.where(empty[..., None], worst_points, moved)
    return moved, error


def _sums_by_code(weighted: Tensor, codes: Tensor, entries: int) -> Tensor:
    """Sums of `weighted` `[codebooks, points, columns]` by code: float64 `[codebooks, entries, columns]`.

    By a kernel on a GPU, else by one flat scatter-add in the order of the points.
    """
    if (sums := kernels.sums_by_code(weighted, codes, entries)) is not None:
        return sums
    codebooks, _, columns = weighted.shape
    place = codes + torch.arange(codebooks, device=codes.device)[:, None] * entries
    flat = (place[..., None] * columns + torch.arange(columns, device=codes.device)).flatten()
    sums = torch.zeros(codebooks * entries * columns, dtype=torch.float64, device=weighted.device)
    return sums.scatter_add_(0, flat, weighted.double().flatten()).view(codebooks, entries, columns)
