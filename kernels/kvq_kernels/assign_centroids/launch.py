"""From tensors to a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels import tuning
from kvq_kernels.assign_centroids.kernel import assign_kernel, sums_kernel

OPERATION = "assign_centroids"
MOST_ENTRIES, MOST_SIZE = 256, 8
MOST_COLUMNS = MOST_SIZE + 1
#: Scaled centroids are below 2^_REACH: high enough above float16's least numbers, 2^-24, low enough below its largest.
_REACH = 5


def inner_size(size: int) -> int:
    """Columns of a point in the product: three times its own, three for the norm; at least 16, a power of two."""
    return max(16, triton.next_power_of_2(3 * size + 3))


def padded_entries(entries: int) -> int:
    return max(16, triton.next_power_of_2(entries))


def centroid_table(centroids: Tensor) -> tuple[Tensor, Tensor]:
    """float16 `[codebooks, K, N]`, what `assign_kernel` multiplies points by, and the power of two by which centroids
    (and are to be points) are multiplied in it, float32 `[codebooks]`."""
    books, entries, size = centroids.shape
    exponent = torch.frexp(centroids.float().abs().amax(dim=(1, 2))).exponent  # the largest is below 2^exponent
    scale = torch.ldexp(torch.ones(books, device=centroids.device), _REACH - exponent)
    scaled = centroids.float() * scale[:, None, None]
    table = scaled.new_zeros(books, inner_size(size), padded_entries(entries), dtype=torch.float16)
    high = scaled.half()
    low = (scaled - high.float()).half()
    for place, part in enumerate((high, low, high)):
        table[:, place * size : (place + 1) * size, :entries] = -part.mT
    rest = scaled.double().square().sum(dim=2) / 2
    for place in range(3):
        part = rest.half()
        table[:, 3 * size + place, :entries] = part
        rest = rest - part.double()
    return table, scale


def assign_constants(size: int, entries: int, tile: dict[str, int]) -> dict:
    return {
        "SIZE": size,
        "ENTRIES": entries,
        "K": inner_size(size),
        "N": padded_entries(entries),
        "R": tile["rows"],
        "TILES": tile["tiles"],
    }


def run_assign(points: Tensor, centroids: Tensor, tile: dict[str, int] | None) -> tuple[Tensor, Tensor]:
    """`assign_centroids` by the kernel."""
    points = points.float().contiguous()
    books, count, size = points.shape
    tile = tile or tuning.configuration(OPERATION, f"assign/size{size}", points.device)
    codes = torch.empty(books, count, dtype=torch.uint8, device=points.device)
    scores = torch.empty(books, count, dtype=torch.float32, device=points.device)
    if codes.numel():
        table, scale = centroid_table(centroids)
        fixed = assign_constants(size, centroids.shape[1], tile)
        grid = (triton.cdiv(count, tile["rows"] * tile["tiles"]), books)
        assign_kernel[grid](points, table, scale, codes, scores, count, **fixed, num_warps=tile["warps"])
    return codes, scores


def sums_constants(columns: int, entries: int, tile: dict[str, int]) -> dict:
    return {
        "COLUMNS": columns,
        "ENTRIES": entries,
        "N": padded_entries(entries),
        "C": max(16, triton.next_power_of_2(3 * columns)),
        "R": tile["rows"],
        "TILES": tile["tiles"],
        "T": tl.float32 if knobs.runtime.interpret else tl.bfloat16,
    }


def run_sums(numbers: Tensor, codes: Tensor, entries: int, tile: dict[str, int] | None) -> Tensor:
    """`sums_by_code` by the kernel."""
    numbers, codes = numbers.float().contiguous(), codes.contiguous()
    books, count, columns = numbers.shape
    tile = tile or tuning.configuration(OPERATION, f"sums/columns{columns}", numbers.device)
    programs = max(1, triton.cdiv(count, tile["rows"] * tile["tiles"]))
    partial = numbers.new_empty(books, programs, entries, 3, columns)
    if partial.numel():
        fixed = sums_constants(columns, entries, tile)
        sums_kernel[(programs, books)](numbers, codes, partial, count, **fixed, num_warps=tile["warps"])
    return partial.sum(dim=(1, 3), dtype=torch.float64)
