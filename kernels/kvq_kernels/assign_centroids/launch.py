"""Launches of k-means: the table of centroids, arguments of both kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels import tuning
from kvq_kernels.assign_centroids.kernel import assign_kernel, sums_kernel
from kvq_kernels.launch_device import on_its_device

OPERATION = "assign_centroids"
MAX_ENTRIES, MAX_SIZE = 256, 8
MAX_COLUMNS = MAX_SIZE + 1
#: Scaled centroids are below 2^_EXPONENT: far from float16's smallest number, 2^-24, and from its largest.
_EXPONENT = 5


def inner_size(size: int) -> int:
    """Inner size of the product: three times a point's numbers, three for the norm; a power of two, at least 16."""
    return max(16, triton.next_power_of_2(3 * size + 3))


def padded_entries(entries: int) -> int:
    """Entries as a power of two, at least 16."""
    return max(16, triton.next_power_of_2(entries))


def centroid_table(centroids: Tensor) -> tuple[Tensor, Tensor]:
    """(table, scale) for `assign_kernel`: the centroids' parts, float16 `[codebooks, K, N]`, and the power of two that
    centroids are multiplied by in it, as points must be, float32 `[codebooks]`."""
    books, entries, size = centroids.shape
    exponent = torch.frexp(centroids.float().abs().amax(dim=(1, 2))).exponent  # the largest is below 2^exponent
    scale = torch.ldexp(torch.ones(books, dtype=torch.float32, device=centroids.device), _EXPONENT - exponent)
    scaled = centroids.float() * scale[:, None, None]
    table = scaled.new_zeros(books, inner_size(size), padded_entries(entries), dtype=torch.float16)
    high = scaled.half()
    low = (scaled - high.float()).half()
    for i, part in enumerate((high, low, high)):
        table[:, i * size : (i + 1) * size, :entries] = -part.mT
    residual = scaled.double().square().sum(dim=2) / 2
    for i in range(3):
        part = residual.half()
        table[:, 3 * size + i, :entries] = part
        residual = residual - part.double()
    return table, scale


def assign_constants(size: int, entries: int, tile: dict[str, int]) -> dict[str, Any]:
    """Compile-time arguments of `assign_kernel`."""
    return {
        "SIZE": size,
        "ENTRIES": entries,
        "K": inner_size(size),
        "N": padded_entries(entries),
        "R": tile["rows"],
        "TILES": tile["tiles"],
    }


@on_its_device
def run_assign(points: Tensor, centroids: Tensor, tile: dict[str, int] | None) -> tuple[Tensor, Tensor]:
    """`assign_centroids` by the kernel."""
    points = points.float().contiguous()
    books, count, size = points.shape
    tile = tile or tuning.configuration(OPERATION, f"assign/size{size}", points.device)
    codes = torch.empty(books, count, dtype=torch.uint8, device=points.device)
    scores = torch.empty(books, count, dtype=torch.float32, device=points.device)
    if codes.numel():
        table, scale = centroid_table(centroids)
        constants = assign_constants(size, centroids.shape[1], tile)
        grid = (triton.cdiv(count, tile["rows"] * tile["tiles"]), books)
        assign_kernel[grid](points, table, scale, codes, scores, count, **constants, num_warps=tile["warps"])
    return codes, scores


def sums_constants(columns: int, entries: int, tile: dict[str, int]) -> dict[str, Any]:
    """Compile-time arguments of `sums_kernel`."""
    return {
        "COLUMNS": columns,
        "ENTRIES": entries,
        "N": padded_entries(entries),
        "C": max(16, triton.next_power_of_2(3 * columns)),
        "R": tile["rows"],
        "TILES": tile["tiles"],
        "T": tl.float32 if knobs.runtime.interpret else tl.bfloat16,
    }


@on_its_device
def run_sums(numbers: Tensor, codes: Tensor, entries: int, tile: dict[str, int] | None) -> Tensor:
    """`sums_by_code` by the kernel."""
    numbers, codes = numbers.float().contiguous(), codes.contiguous()
    books, count, columns = numbers.shape
    tile = tile or tuning.configuration(OPERATION, f"sums/columns{columns}", numbers.device)
    programs = max(1, triton.cdiv(count, tile["rows"] * tile["tiles"]))
    partial = numbers.new_empty(books, programs, entries, 3, columns)
    if partial.numel():
        constants = sums_constants(columns, entries, tile)
        sums_kernel[(programs, books)](numbers, codes, partial, count, **constants, num_warps=tile["warps"])
    return partial.sum(dim=(1, 3), dtype=torch.float64)
