"""Compare codes of 16 bits (65,536 centroids, found by faiss) with codes of 8 bits (256) at equal bits, on captured
activations: what a codebook method would gain from longer chunks (docs/ROTATIONS.md).

    python -m lab.studies.large_codes results/captured/smollm2/NAME --layers 2 15 28

The folder is one that `kvq calibrate --captured` or `kvq reproduce` keeps. Prints, for keys and values of each layer,
the Fisher-weighted error || x - c ||^2 / || x ||^2 of numbers normalized per channel, on the samples that trained the
codebooks and on the last ones, which did not. `own` codebooks are one for each chunk of channels, `shared` ones are one
for all chunks of the stream: 65,536 centroids of 8 numbers take 1 MiB, more than all own ones of 256 (96 KiB).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from kvq_cli.calibration.work_folder import WorkFolder

Floats = NDArray[np.float32]


def chunks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """`[samples, tokens, heads, head_dim]` -> `[chunks of channels, samples * tokens, size]`."""
    return numbers.flatten(0, 1).flatten(1).unflatten(1, (-1, size)).transpose(0, 1)


def trained(points: Floats, weights: Floats, entries: int, iterations: int) -> faiss.Kmeans:
    """Weighted k-means of all points."""
    kmeans = faiss.Kmeans(
        points.shape[1], entries, niter=iterations, seed=0, min_points_per_centroid=1, max_points_per_centroid=1 << 30
    )
    kmeans.train(points, weights=weights)
    return kmeans


def error(kmeans: faiss.Kmeans, points: Floats, numbers_weights: Floats) -> tuple[float, float]:
    """Weighted squared error, and weighted squares, of `points`."""
    _, codes = kmeans.index.search(points, 1)
    difference = points - kmeans.centroids[codes[:, 0]]
    return float((numbers_weights * difference**2).sum()), float((numbers_weights * points**2).sum())


def study(x: torch.Tensor, g: torch.Tensor, entries: int, size: int, shared: bool, iterations: int) -> str:
    """One line: errors of codebooks of `entries` centroids of `size` numbers. x, g: `[samples, tokens, heads, D]`."""
    held, start = max(1, len(x) // 4), time.perf_counter()
    mean, std = x[:-held].mean((0, 1)), x[:-held].std((0, 1)).clamp_min(1e-6)
    sets = []
    for cut in (slice(None, -held), slice(-held, None)):
        points, weights = chunks((x[cut] - mean) / std, size), chunks(g[cut].square() * std.square(), size)
        if shared:
            points, weights = points.flatten(0, 1)[None], weights.flatten(0, 1)[None]
        sets.append((points.contiguous().numpy(), weights.contiguous().numpy()))
    sums = np.zeros((2, 2))
    for book in range(len(sets[0][0])):
        points, weights = sets[0][0][book], sets[0][1][book]
        kmeans = trained(points, weights.mean(1), entries, iterations)
        for i, (all_points, all_weights) in enumerate(sets):
            sums[i] += error(kmeans, all_points[book], all_weights[book])
    train, test = sums[:, 0] / sums[:, 1]
    kind = "shared" if shared else "own"
    per = sets[0][0].shape[1] / entries
    book = f"{entries:6} x {size} {kind:6} {per:8.0f} points each"
    return f"{book}   train {train:.4f}   held out {test:.4f}   {time.perf_counter() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 15, 28])
    parser.add_argument("--heads", type=int, default=3, help="kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=8)
    options = parser.parse_args()
    read = WorkFolder(options.folder).read_samples
    for layer in options.layers:
        for kind in "kv":
            name = f"{layer}.{kind}"
            size = (options.folder / f"{name}.x.bf16").stat().st_size
            shape = (options.samples, size // (2 * options.samples * options.heads * options.head_dim))
            x, g = (read(f"{name}.{each}", (*shape, options.heads, options.head_dim)).float() for each in "xg")
            for entries, length, shared in ((256, 4, False), (256, 4, True), (65536, 8, True)):
                print(name, study(x, g, entries, length, shared, options.iterations), flush=True)


if __name__ == "__main__":
    main()
