"""Lloyd's iterations by faiss: the second engine of weighted k-means, and the one for large codebooks."""

from __future__ import annotations

from math import inf

import faiss
import numpy as np
import torch
from torch import Tensor

# Searches of at least so many points use matrix products. faiss 1.15 compares points one by one up to 128,000 numbers,
# which takes ten times as long for blocks of 1 to 8 numbers; before, this was the default.
faiss.cvar.distance_compute_blas_threshold = 20

_ITERATIONS = 5  # between two measurements of the error, each of which takes about as long as an iteration


def lloyd_faiss(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Centroids after Lloyd's iterations from given ones, codebook after codebook; arguments as of `kmeans.lloyd`.

    faiss weights the means, but neither the centroids that it draws itself nor the objective that it reports. So it
    starts from the given ones, and the weighted error says when a codebook is done.
    """
    faiss.omp_set_num_threads(torch.get_num_threads())  # of this thread: several may cluster side by side
    count, size = points.shape[1:]
    entries = centroids.shape[1]
    kmeans = faiss.Kmeans(size, entries, min_points_per_centroid=1, max_points_per_centroid=count)
    kmeans.index = _flat_index(size, points.device)
    arrays = (tensor.cpu().numpy() for tensor in (points, weights, centroids))
    books = [_lloyd_book(kmeans, *book, iterations, tolerance) for book in zip(*arrays, strict=True)]
    return torch.from_numpy(np.stack(books)).to(points.device)


def _lloyd_book(
    kmeans: faiss.Kmeans,
    points: np.ndarray,
    weights: np.ndarray,
    centroids: np.ndarray,
    iterations: int,
    tolerance: float,
) -> np.ndarray:
    """One codebook `[entries, size]`, from points `[points, size]` and their weights `[points]`."""
    weights = weights / weights.mean()  # which cluster faiss splits in place of an empty one depends on their scale
    before = inf
    for done in range(0, iterations, _ITERATIONS):
        kmeans.cp.niter = min(_ITERATIONS, iterations - done)
        kmeans.train(points, weights, centroids)
        centroids = kmeans.centroids
        distances, _ = kmeans.assign(points)
        error = float(np.dot(weights, distances.astype(np.float64)))
        if before - error <= kmeans.cp.niter * tolerance * error:
            break
        before = error
    return centroids


def _flat_index(size: int, device: torch.device) -> faiss.Index:
    """An exact search for nearest centroids: on the points' GPU where faiss supports it, else on the CPU."""
    if device.type != "cuda" or faiss.get_num_gpus() == 0:
        return faiss.IndexFlatL2(size)
    config = faiss.GpuIndexFlatConfig()
    config.device = torch.cuda.current_device() if device.index is None else device.index
    return faiss.GpuIndexFlatL2(faiss.StandardGpuResources(), size, config)
