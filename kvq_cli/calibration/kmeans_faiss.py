"""Lloyd iterations by faiss: the second engine of weighted k-means, used for large codebooks."""

from __future__ import annotations

from math import inf

import faiss
import numpy as np
import torch
from torch import Tensor

# Searches of at least this many points use matrix products. faiss 1.15 compares up to 128,000 numbers point by point,
# which is ten times slower for blocks of 1 to 8 numbers.
faiss.cvar.distance_compute_blas_threshold = 20

_ITERATIONS = 5  # between two measurements of the error, each about as slow as an iteration


def lloyd_faiss(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int, tolerance: float) -> Tensor:
    """`kmeans.lloyd` by faiss, codebook by codebook.

    faiss weights the means, but neither its initial centroids nor the objective that it reports. So it starts from
    `centroids`, and the weighted error decides when a codebook has converged.
    """
    faiss.omp_set_num_threads(torch.get_num_threads())  # per thread: several may cluster in parallel
    count, size = points.shape[1:]
    entries = centroids.shape[1]
    kmeans = faiss.Kmeans(size, entries, min_points_per_centroid=1, max_points_per_centroid=count)
    kmeans.index = _flat_index(size, points.device)
    u, w, c = (tensor.cpu().numpy() for tensor in (points, weights, centroids))
    codebooks = [_lloyd_codebook(kmeans, u[i], w[i], c[i], iterations, tolerance) for i in range(len(c))]
    return torch.from_numpy(np.stack(codebooks)).to(points.device)


def _lloyd_codebook(
    kmeans: faiss.Kmeans,
    points: np.ndarray,
    weights: np.ndarray,
    centroids: np.ndarray,
    iterations: int,
    tolerance: float,
) -> np.ndarray:
    """Centroids `[entries, size]` of one codebook, from points `[points, size]` and weights `[points]`."""
    weights = weights / weights.mean()  # their scale affects which cluster faiss splits to replace an empty one
    before = inf
    for done in range(0, iterations, _ITERATIONS):
        kmeans.cp.niter = min(_ITERATIONS, iterations - done)
        kmeans.train(points, weights, centroids)
        centroids = np.asarray(kmeans.centroids)
        distances, _ = kmeans.assign(points)
        error = float(np.dot(weights, distances.astype(np.float64)))
        if before - error <= kmeans.cp.niter * tolerance * error:
            break
        before = error
    return centroids


def _flat_index(size: int, device: torch.device) -> faiss.Index:
    """An exact nearest-centroid index: on the points' GPU where this faiss supports GPUs, else on the CPU."""
    if device.type != "cuda" or faiss.get_num_gpus() == 0:
        return faiss.IndexFlatL2(size)
    config = faiss.GpuIndexFlatConfig()
    config.device = torch.cuda.current_device() if device.index is None else device.index
    return faiss.GpuIndexFlatL2(faiss.StandardGpuResources(), size, config)
