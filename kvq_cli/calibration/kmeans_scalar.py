"""Weighted k-means of scalars: clusters are intervals of the sorted points, so that the best partition is computed, not
searched from random starts.

Dynamic programming finds the best partition that cuts the points at a grid of places; Lloyd iterations then move the
cuts between any two points. Sums over an interval are differences of prefix sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CUTS = 512  # places at which dynamic programming may cut
_BATCH = 64  # codebooks at a time
_NONE = torch.iinfo(torch.int64).max


def scalar_kmeans(points: Tensor, weights: Tensor, entries: int, iterations: int) -> Tensor:
    """Centroids `[codebooks, entries]` float32, ascending, that minimize sum_i w_i (u_i - c_assign(i))^2 up to the grid
    of cuts.

    points, weights: `[codebooks, points]`, some weight above 0 in each codebook. iterations: Lloyd iterations at most.
    """
    parts = zip(points.split(_BATCH), weights.split(_BATCH), strict=True)
    return torch.cat([_cluster(u.double(), w.double(), entries, iterations) for u, w in parts])


def _cluster(points: Tensor, weights: Tensor, entries: int, iterations: int) -> Tensor:
    center = (points * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)  # so that squares do not cancel
    u, order = (points - center).sort(dim=-1)
    w = weights.gather(1, order)
    moments = torch.stack([w, w * u, w * u * u])  # [3, codebooks, points]
    sums = F.pad(moments.cumsum(-1), (1, 0))
    cuts = _best_cuts(sums, entries)
    for _ in range(iterations):
        means = _means(sums, cuts)
        moved = F.pad(torch.searchsorted(u, (means[:, 1:] + means[:, :-1]) / 2), (1, 0))
        moved = torch.cat([moved, cuts[:, -1:]], dim=1)
        if torch.equal(moved, cuts):
            break
        cuts = moved
    return (_means(sums, cuts) + center).float()


def _best_cuts(sums: Tensor, entries: int) -> Tensor:
    """Bounds of the clusters, int64 `[codebooks, entries + 1]`, of which the inner ones are on a grid of points.

    sums: prefix sums of w, w u and w u^2, `[3, codebooks, points + 1]`.
    """
    grid = _grid(sums, max(CUTS, 4 * entries))
    moments = sums.gather(2, grid.expand(3, -1, -1))
    best = _cost(moments - moments[:, :, :1], grid > 0)
    came_from = []
    for _ in range(entries - 1):
        best, start = _extend(best, moments, grid)
        came_from.append(start)
    place = torch.full((len(best), 1), grid.shape[1] - 1, device=sums.device)
    path = [place]
    for start in reversed(came_from):
        place = start.gather(1, place)
        path.append(place)
    return grid.gather(1, torch.cat([torch.zeros_like(place), *reversed(path)], dim=1))


def _cost(moments: Tensor, has_points: Tensor) -> Tensor:
    """Squared errors of intervals around their weighted means; infinite for those without a point. moments: sums of w,
    w u and w u^2, `[3, ...]`."""
    w, wu, wuu = moments
    cost = (wuu - wu.square() / w.clamp_min(1e-300)).clamp_min_(0)
    return torch.where(has_points, cost, torch.inf)


def _extend(best: Tensor, moments: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """(least best[start] + cost of [start, end) over all starts, that start) for each end: `[codebooks, places]` each.

    The best start rises with the end, since the costs of intervals obey the quadrangle inequality: for the ends in the
    middle between known ones, only starts between theirs are tried (divide and conquer, as Ckmeans.1d.dp does).

    best: `[codebooks, places]`; moments: prefix sums at the places, `[3, codebooks, places]`; grid: the places.
    """
    books, places = best.shape
    first_row = (torch.arange(books, device=best.device) * places).unsqueeze(1)  # of a codebook in flattened tensors
    least, start = best.new_full(best.shape, torch.inf), torch.zeros_like(grid)
    feasible = best.isfinite().int().argmax(dim=1, keepdim=True)  # the first place with enough points before it
    flat_best, flat_moments, flat_grid = best.flatten(), moments.flatten(1), grid.flatten()
    step = 1 << (places - 1).bit_length()
    while step := step // 2:
        ends = torch.arange(step, places, 2 * step, device=best.device)
        low = start[:, ends - step].maximum(feasible)
        high = torch.where(ends + step < places, start[:, (ends + step).clamp_max(places - 1)], places)
        counts = (high.minimum(ends - 1) - low + 1).clamp_min(1).flatten()
        # All tries of all ends one behind the other, since their numbers differ.
        owner = torch.repeat_interleave(torch.arange(len(counts), device=best.device), counts)
        offset = torch.arange(len(owner), device=best.device) - (counts.cumsum(0) - counts)[owner]
        tried = (low + first_row).flatten()[owner] + offset
        end = (ends + first_row).flatten()[owner]
        cost = _cost(flat_moments[:, end] - flat_moments[:, tried], flat_grid[tried] < flat_grid[end])
        total = flat_best[tried] + cost
        minimum = total.new_full(counts.shape, torch.inf).scatter_reduce_(0, owner, total, "amin")
        hit = torch.where(total == minimum[owner], tried, _NONE)
        at = torch.full_like(counts, _NONE).scatter_reduce_(0, owner, hit, "amin")
        least[:, ends], start[:, ends] = minimum.view(books, -1), at.view(books, -1) - first_row
    return least, start


def _grid(sums: Tensor, cuts: int) -> Tensor:
    """Ascending places between points, int64 `[codebooks, cuts + 1]` from 0 to the number of points; at equal steps of
    the share of the points, their weights and their squared errors, so that neither the bulk nor a tail is one cell."""
    count = sums.shape[2] - 1
    if count <= cuts:
        return torch.arange(count + 1, device=sums.device).expand(sums.shape[1], -1)
    shares = torch.linspace(0, 1, count + 1, dtype=sums.dtype, device=sums.device)
    for part in (sums[0], sums[2]):
        shares = shares + part / part[:, -1:].clamp_min(1e-300)
    steps = torch.linspace(0, 1, cuts + 1, dtype=sums.dtype, device=sums.device) * shares[:, -1:]
    grid = torch.searchsorted(shares, steps).clamp_max_(count)
    grid[:, 0], grid[:, -1] = 0, count
    return grid


def _means(sums: Tensor, cuts: Tensor) -> Tensor:
    """Weighted means of the clusters `[codebooks, entries]`, ascending; one without weight repeats its left neighbour's
    (the first: the next)."""
    w, wu, _ = sums.gather(2, cuts.expand(3, -1, -1)).diff(dim=2)
    means = torch.where(w > 0, wu / w.clamp_min(1e-300), -torch.inf).cummax(dim=1).values
    first = torch.where(means.isfinite(), means, torch.inf).amin(dim=1, keepdim=True)
    return torch.where(means.isfinite(), means, first)
