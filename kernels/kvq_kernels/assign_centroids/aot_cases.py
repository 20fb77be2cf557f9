"""Ahead-of-time cases of k-means; a "number" of these launches is a pair of a point and a centroid."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_kernels import tuning
from kvq_kernels.aot_cases import Launch
from kvq_kernels.assign_centroids.kernel import assign_kernel, sums_kernel
from kvq_kernels.assign_centroids.launch import OPERATION, assign_constants, sums_constants

BOOKS, COUNT = 256, 1 << 16


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(gpu: str) -> dict[str, Launch]:
    """Both steps for each size of points."""
    cases = {}
    for size, entries in ((1, 16), (2, 256), (4, 256), (8, 256)):
        tile = tuning.configuration(OPERATION, f"assign/size{size}", gpu)
        fixed = assign_constants(size, entries, tile)
        table = _empty(BOOKS, fixed["K"], fixed["N"], dtype=torch.float16)
        out = _empty(BOOKS, COUNT, dtype=torch.uint8), _empty(BOOKS, COUNT)
        points = _empty(BOOKS, COUNT, size)
        cases[f"assign-size{size}-{entries}"] = Launch(
            assign_kernel,
            (points, table, _empty(BOOKS), *out, COUNT),
            fixed,
            {"num_warps": tile["warps"]},
            numbers=fixed["R"] * entries,
        )
        columns = size + 1
        tile = tuning.configuration(OPERATION, f"sums/columns{columns}", gpu)
        fixed = sums_constants(columns, entries, tile) | {"T": tl.bfloat16}
        codes = _empty(BOOKS, COUNT, dtype=torch.int64)
        cases[f"sums-size{size}-{entries}"] = Launch(
            sums_kernel,
            (_empty(BOOKS, COUNT, columns), codes, _empty(BOOKS, 128, entries, 3, columns), COUNT),
            fixed,
            {"num_warps": tile["warps"]},
            numbers=fixed["R"] * entries,
        )
    return cases
