"""K-means over many small codebooks: nearest centroid of each point, and sums of points by centroid.

`kernel.py` has a kernel for each step, `launch.py` their arguments, `reference.py` the same in PyTorch.
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.assign_centroids.launch import MAX_COLUMNS, MAX_ENTRIES, MAX_SIZE, run_assign, run_sums
from kvq_kernels.assign_centroids.reference import assign_centroids_reference, sums_by_code_reference
from kvq_kernels.launch_device import Backend, uses_triton

__all__ = ["assign_centroids", "sums_by_code"]


def assign_centroids(
    points: Tensor, centroids: Tensor, *, backend: Backend = "auto", tile: dict[str, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Nearest centroid of each point: argmin and minimum of ||c||^2 / 2 - u.c over its codebook (TemporalKV, Eq. 4-5).

    points: float32 `[codebooks, points, size]`, size at most 8. centroids: float32 `[codebooks, entries, size]`, at
    most 256 entries. Distances are never written to memory.

    Returns codes, uint8 `[codebooks, points]`, the first of equally near centroids, and their scores, float32, exact to
    about 2^-22 |u| max|c|. Points beyond 2000 times the largest number of their codebook are clamped to that. A point's
    code does not depend on other points.

    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch". tile: replaces the
    tuned one: rows, tiles, warps. ValueError for shapes that do not fit.
    """
    books, _, size = points.shape
    if centroids.shape[0] != books or centroids.shape[2] != size or not 0 < size <= MAX_SIZE:
        raise ValueError(f"points {tuple(points.shape)} do not fit centroids {tuple(centroids.shape)}")
    if centroids.shape[1] > MAX_ENTRIES:
        raise ValueError(f"{centroids.shape[1]} centroids in a codebook, at most {MAX_ENTRIES}")
    if uses_triton(points, backend):
        return run_assign(points, centroids, tile)
    return assign_centroids_reference(points, centroids)


def sums_by_code(
    numbers: Tensor, codes: Tensor, entries: int, *, backend: Backend = "auto", tile: dict[str, int] | None = None
) -> Tensor:
    """Sums of the rows of `numbers` with the same code; of rows (w u, w), the k-means update (Eq. 3).

    numbers: float32 `[codebooks, points, columns]`, at most 9 columns. codes: integers `[codebooks, points]` in
    [0, entries), entries at most 256. backend, tile: as in `assign_centroids`.

    Returns float64 `[codebooks, entries, columns]`, deterministic: every sum has a fixed order.
    """
    if codes.shape != numbers.shape[:2] or numbers.shape[2] > MAX_COLUMNS or entries > MAX_ENTRIES:
        raise ValueError(f"numbers {tuple(numbers.shape)}, codes {tuple(codes.shape)} of {entries} entries do not fit")
    if uses_triton(numbers, backend):
        return run_sums(numbers, codes, entries, tile)
    return sums_by_code_reference(numbers, codes, entries)
