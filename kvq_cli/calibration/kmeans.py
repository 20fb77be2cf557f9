"""Weighted k-means for many small codebooks at once.

One algorithm for every device: on a CPU in batched torch, codebook after codebook, so that all work on one of them
stays in a core's cache (and the caller may run several streams side by side); on a GPU many go through each step
together, and kernels find the nearest centroids and add up the clusters. It needs no further package and runs on
whatever torch runs on; `kmeans_faiss` is the second engine, whose iterations take less time on a CPU: a third to a
half for 8192 points and 256 centroids, a quarter for 32768 points and 4096 centroids.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvq_cli.codecs import kernels
from kvq_cli.errors import KvqError

#: Who runs Lloyd's iterations: this module, faiss, or whichever suits the codebook's size.
Engine = Literal["auto", "kvq", "faiss"]
#: The most that `auto` leaves to this module: with more, an index would take over ten bits of a score (`_nearest`).
MAX_KVQ_ENTRIES = 1024

_SEEDING_POINTS = 8  # per centroid: as many points as k-means++ looks at
_TILE_CPU, _TILE = 1 << 17, 1 << 26  # scores held at once: a part of a core's cache, or of a GPU's memory


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
    """Minimize sum_i w_i ||u_i - c_assign(i)||^2 (Eq. 3) for each codebook: k-means++ start, then Lloyd iterations.

    points:  `[codebooks, points, size]` float32, at least `entries` points. weights: `[codebooks, points]`, >= 0.
    A codebook is done after `iterations`, or when one of them lowers its error by less than the share `tolerance`.
    Returns the centroids `[codebooks, entries, size]` float32: the same ones for the same arguments and machine.
    """
    if points.shape[1] < entries:
        raise ValueError(f"{entries} centroids need as many points, not {points.shape[1]}")
    nothing = weights.sum(-1, keepdim=True) == 0  # a codebook that nothing depends on is clustered without weights
    weights = torch.where(nothing, torch.ones_like(weights), weights)
    draws = torch.rand(points.shape[0], entries, generator=torch.Generator().manual_seed(seed)).to(points.device)

    seeded, moved = _together(points.shape[0], points.shape[1] * entries, points.device.type)
    starts = torch.cat([kmeans_plus_plus(p, w, d) for p, w, d in _split(seeded, points, weights, draws)])
    if choose_engine(engine, entries) == "faiss":
        from kvq_cli.calibration.kmeans_faiss import lloyd_faiss

        return lloyd_faiss(points, weights, starts, iterations, tolerance)
    books = [lloyd(p, w, c, iterations, tolerance) for p, w, c in _split(moved, points, weights, starts)]
    return torch.cat(books)


def choose_engine(engine: Engine, entries: int) -> Literal["kvq", "faiss"]:
    """The engine that clusters codebooks of `entries`: `auto` is faiss above `MAX_KVQ_ENTRIES` where it is installed.

    Does not import faiss. Raises KvqError where faiss is asked for and not installed.
    """
    if engine == "kvq" or (engine == "auto" and entries <= MAX_KVQ_ENTRIES):
        return "kvq"
    if find_spec("faiss") is not None:
        return "faiss"
    if engine == "faiss":
        raise KvqError(
            "--kmeans faiss needs the package faiss, which is not installed: pip install 'kvq-cli[faiss]', "
            "or 'kvq-cli[faiss-gpu]' where there is a CUDA GPU"
        )
    return "kvq"


def _together(books: int, scores: int, device: str) -> tuple[int, int]:
    """How many codebooks are seeded and then moved at a time: seeding is many short steps, which several share."""
    if device == "cpu":
        return 16, 1
    several = max(1, min(books, _TILE // scores))
    return several, several


def _split(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def kmeans_plus_plus(points: Tensor, weights: Tensor, draws: Tensor) -> Tensor:
    """k-means++: each next centroid is a point, drawn with a probability in proportion to w_i D_i^2.

    Shapes as in `weighted_kmeans`; draws: `[codebooks, entries]` uniform in [0, 1), one for each centroid.
    Looks at the first few points only: they come in random order.
    """
    entries = draws.shape[1]
    points, weights = (x[:, : entries * _SEEDING_POINTS] for x in (points, weights))
    coordinates = points.permute(2, 0, 1).contiguous()  # [size, codebooks, points]: a distance is a few plain sums
    books = torch.arange(points.shape[0], device=points.device)
    distance = torch.ones_like(weights)
    chosen = []
    for draw in draws.T:
        mass = (distance * weights).cumsum(-1)
        # At most the last point: also where all mass is 0, since every point is a centroid already.
        index = torch.searchsorted(mass, draw[:, None] * mass[:, -1:], right=True).squeeze(-1)
        index = index.clamp_(max=points.shape[1] - 1)
        chosen.append(points[books, index])
        new = torch.zeros_like(distance)
        for coordinate in coordinates:
            new += (coordinate - coordinate[books, index][:, None]).square_()
        distance = new if len(chosen) == 1 else torch.minimum(distance, new)
    return torch.stack(chosen, dim=1)


def lloyd(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Lloyd's iterations from given centroids. Shapes as in `weighted_kmeans`; a finished codebook stands still."""
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
    """The number of each point's nearest centroid, int64 `[codebooks, points]`; as exact as `_nearest`."""
    _, size = _together(points.shape[0], points.shape[1] * centroids.shape[1], points.device.type)
    return torch.cat([_nearest(p, c)[1] for p, c in _split(size, points, centroids)])


def _nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point by ||c||^2 / 2 - u.c (Eq. 4-5): scores and codes, `[codebooks, points]`.

    The minimum and where it is are found in one pass: a centroid's number stands in the score's lowest bits. So two
    centroids whose scores differ by less than 2^-15 of their size count as equally near, which clustering can afford.
    """
    if (found := kernels.assign_centroids(points, centroids)) is not None:
        codes, best = found
        return best, codes
    books, count, _ = points.shape
    entries = centroids.shape[1]
    mask = (1 << max(1, (entries - 1).bit_length())) - 1
    numbers = torch.arange(entries, dtype=torch.int32, device=points.device)[:, None]
    half_norms = centroids.square().sum(-1, keepdim=True) / 2
    best = torch.empty(books, count, device=points.device)
    tile = max(64, (_TILE_CPU if points.device.type == "cpu" else _TILE) // (books * entries))
    for start in range(0, count, tile):
        part = points[:, start : start + tile].transpose(1, 2)
        scores = torch.baddbmm(half_norms, centroids, part, alpha=-1)  # [books, entries, tile]
        scores.view(torch.int32).bitwise_and_(~mask).bitwise_or_(numbers)
        best[:, start : start + tile] = scores.amin(1)
    return best, (best.view(torch.int32) & mask).long()


def _update(weighted: Tensor, norms: Tensor, scores: Tensor, codes: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means of the clusters, and the error that is left: sum w ||u||^2 - sum_j W_j ||c_j||^2.

    A centroid without weight moves to one of the points that add most to the error.
    """
    sums = _sums(weighted, codes, centroids.shape[1])
    mass = sums[..., -1:]
    means = sums[..., :-1] / mass.clamp_min(1e-300)
    weights = weighted[..., -1]
    error = (weights * norms).sum(-1, dtype=torch.float64) - (mass * means.square()).sum((1, 2))
    moved = torch.where(mass > 0, means.float(), centroids)
    empty = mass.squeeze(-1) <= 0
    if most := int(empty.sum(-1).max()):
        worst = (weights * (norms + 2 * scores)).topk(most).indices  # [books, most]
        rank = (empty.cumsum(-1) - 1).clamp_min(0)  # the how-manieth empty one of its codebook
        points = weighted[..., :-1] / weights[..., None].clamp_min(1e-38)
        source = worst.gather(1, rank.clamp_max(most - 1))
        taken = points.gather(1, source[..., None].expand_as(centroids))
        moved = torch.where(empty[..., None], taken, moved)
    return moved, error


def _sums(weighted: Tensor, codes: Tensor, entries: int) -> Tensor:
    """Sums of `weighted` `[codebooks, points, columns]` by code: float64 `[codebooks, entries, columns]`.

    Otherwise one flat scatter: each sum is taken in the order of the points.
    """
    if (found := kernels.sums_by_code(weighted, codes, entries)) is not None:
        return found
    books, _, columns = weighted.shape
    place = codes + torch.arange(books, device=codes.device)[:, None] * entries
    flat = (place[..., None] * columns + torch.arange(columns, device=codes.device)).flatten()
    sums = torch.zeros(books * entries * columns, dtype=torch.float64, device=weighted.device)
    return sums.scatter_add_(0, flat, weighted.double().flatten()).view(books, entries, columns)
