"""Nearest centroid: the same index for a block alone and among others.

A floating-point matrix product may round differently for other shapes, so that a block could get another code when it
is compressed alone than when it is compressed among others. Here all numbers are integers of double precision whose
products and sums stay below 2^53: nothing is ever rounded, so the order of additions cannot matter. A GPU's kernel
treats every block alike as well, but compares in float32: of two centroids that are equally near to about 2^-20 of
their codebook's extent, it may take the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvq_cli.codecs import kernels
from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_ENTRIES = 256
#: Entries of a codebook with 16-bit codes.
LARGE_ENTRIES = 1 << 16
#: Devices that keep the tables made for encoding and decoding.
KEEPS_TABLES = ("cpu",)
#: Centroids are rounded to multiples of 2^-17 of the (power of two above the) largest number of their codebook, of
#: 2^-13 where an index takes 16 bits, ...
_CENTROID_BITS, _LARGE_CENTROID_BITS = 17, 13
#: ... and blocks likewise; these may be up to 2^6 times as large as that number; larger ones are clamped.
_RANGE_BITS = 6
#: Distances that are held at once: on a CPU by each thread, about as much as stays in a core's cache. In smaller tiles
#: threads wait for each other more often, above all where other processes use the cores, too.
_TILE_CPU, _TILE = 1 << 18, 1 << 25
_LEAST_ROWS = 16  # of a tile: a large table is read once for so many blocks
_IGNORING_TILE = 1 << 10  # blocks, each with its codebook


def _centroid_bits(entries: int) -> int:
    return _CENTROID_BITS if entries <= MAX_ENTRIES else _LARGE_CENTROID_BITS


def _places(entries: int) -> int:
    """A power of two above all indices of so many entries: 256 or 65,536."""
    return MAX_ENTRIES if entries <= MAX_ENTRIES else LARGE_ENTRIES


def code_type(entries: int) -> str:
    """The name of the dtype of an index of so many entries: uint8, or int16 whose 16 bits are the index."""
    return "uint8" if entries <= MAX_ENTRIES else "int16"


def grid_max(entries: int) -> float:
    """The largest number of a block on the integer grid of a codebook of so many entries."""
    return float(2 ** (_centroid_bits(entries) + _RANGE_BITS))


def grid_scale(centroids: Tensor) -> Tensor:
    """The power of two that takes a codebook `[books, entries, size]` to the integer grid; float32 `[books]`."""
    largest = centroids.float().abs().amax(dim=(1, 2))
    exponent = torch.frexp(largest).exponent  # largest < 2^exponent
    return torch.ldexp(torch.ones_like(largest), _centroid_bits(centroids.shape[1]) - exponent)


def nearest(blocks: Tensor, table: Tensor) -> Tensor:
    """Index of the centroid with the least ||c||^2 - 2 u.c (Eq. 4-5), the first of equally near ones.

    blocks: `[books, n, size]`, already on the grid: whole numbers of at most `grid_max`, size at most 8.
    table:  the centroids as `ranked` gives them.
    Returns `[books, n]` of `code_type`.
    """
    books, count, size = blocks.shape
    entries = table.shape[2]
    dtype = getattr(torch, code_type(entries))
    if entries <= MAX_ENTRIES and kernels.on_gpu(blocks):
        codes = _nearest_by_kernel(blocks, (table[:, :size] / (-2 * MAX_ENTRIES)).mT.float())
        if codes is not None:
            return codes
    if size == 1:
        return _nearest_scalar(blocks.squeeze(2), table)
    points = blocks.new_ones(books, count, size + 1, dtype=torch.float64)
    points[:, :, :size] = blocks
    ranks = points.new_empty(books, count)
    cpu = blocks.device.type == "cpu"
    most = _TILE_CPU * torch.get_num_threads() if cpu else _TILE
    rows = max(1, min(count, max(_LEAST_ROWS, most // _places(entries))))
    together = max(1, most // (_places(entries) * rows))
    # One tensor for the scores of all tiles: memory that is new to the process costs a CPU as much as the product.
    scratch = points.new_empty(min(books, together) * rows * entries)
    for b in range(0, books, together):
        for r in range(0, count, rows):
            tile = ranks[b : b + together, r : r + rows]
            scores = scratch[: tile.numel() * entries].view(*tile.shape, -1)
            torch.bmm(points[b : b + together, r : r + rows], table[b : b + together], out=scores)
            torch.amin(scores, dim=2, out=tile)
    return ranks.to(torch.int64).to(dtype)  # the lowest bits: the index


def nearest_of(blocks: Tensor, centroids: Tensor, scale: Tensor, table: Callable[[], Tensor]) -> Tensor:
    """As `nearest`, of centroids `[books, entries, size]` with their `grid_scale`. table: gives them as `ranked` does,
    which a GPU's kernel does not need."""
    if centroids.shape[1] <= MAX_ENTRIES and kernels.on_gpu(blocks):
        # As in `ranked`: products with powers of two are exact in float32, too.
        codes = _nearest_by_kernel(blocks, (centroids.float() * scale.view(-1, 1, 1)).round_())
        if codes is not None:
            return codes
    return nearest(blocks, table())


def _nearest_by_kernel(blocks: Tensor, centroids: Tensor) -> Tensor | None:
    """centroids: on the grid, float32. None: the kernel does not take them."""
    assigned = kernels.assign_centroids(blocks, centroids)
    return None if assigned is None else assigned[0].to(getattr(torch, code_type(centroids.shape[1])))


def nearest_ignoring(blocks: Tensor, ignored: Tensor, books: Tensor, table: Tensor) -> Tensor:
    """Index of the centroid nearest to the numbers of a block that are not `ignored`: least sum of c^2 - 2 u c of them.

    blocks: `[n, size]` on the grid, as for `nearest`. ignored: bool `[n, size]`. books: int64 `[n]`, the codebook of
    each block. table: the centroids of all codebooks, at most 256 each, as `ranked` gives them. Returns uint8 `[n]`.
    """
    size, best = blocks.shape[1], torch.empty(len(blocks), dtype=torch.uint8, device=blocks.device)
    places = torch.arange(table.shape[2], dtype=torch.float64, device=blocks.device)
    for part in torch.arange(len(blocks), device=blocks.device).split(_IGNORING_TILE):
        kept = (~ignored[part]).to(torch.float64)
        products = table[books[part], :size]  # -512 c
        scores = torch.bmm((blocks[part] * kept).unsqueeze(1), products)
        scores += torch.bmm(kept.unsqueeze(1), products.square_().div_(4 * MAX_ENTRIES))  # 256 c^2
        best[part] = (scores.squeeze(1) + places).amin(dim=1).to(torch.int64).to(torch.uint8)
    return best


def ranked(centroids: Tensor, scale: Tensor) -> Tensor:
    """Centroids `[books, entries, size]`, entries at most 65,536, with their `grid_scale`, for `nearest`.

    Float64 `[books, size + 1, entries]`, by which (u, 1) gives P (||c||^2 - 2 u.c) + index, where P is 256, or 65,536
    for more entries: the least of these numbers is the nearest centroid's and carries its index: a plain minimum (much
    faster than an argmin) finds it.

    Where size is 1, two more rows: twice the midpoints of the sorted entries, from place 1 on, and their order.

    With size 8, 256 ||c||^2 is at most 2^45 and 512 u.c at most 2^52, and so are these with 65,536 and its coarser
    grid: together below 2^53.
    """
    books, entries, size = centroids.shape
    table = torch.empty(ranked_layout(books, entries, size).shape, dtype=torch.float64, device=centroids.device)
    grid, constant = table[:, :size], table[:, size]
    grid.copy_(centroids.transpose(1, 2)).mul_(scale.view(-1, 1, 1)).round_()
    torch.sum(grid * grid, dim=1, out=constant)
    constant.mul_(_places(entries)).add_(torch.arange(entries, device=centroids.device))
    if size == 1:
        table[:, 2, 1:], table[:, 3] = _scalar_order(grid.squeeze(1))
    grid.mul_(-2 * _places(entries))
    return table


def ranked_layout(books: int, entries: int, size: int) -> TensorSpec:
    """Shape and dtype of what `ranked` returns."""
    return TensorSpec((books, size + 1 if size > 1 else 4, entries), "float64")


def _nearest_scalar(numbers: Tensor, table: Tensor) -> Tensor:
    """The same for `[books, n]` numbers on the grid, by a binary search: between which midpoints does a number lie?
    Twice these and the numbers are whole and at most 2^24, exact in float32."""
    middle, order = table[:, 2, 1:].float(), table[:, 3].to(torch.int64)
    return order.gather(1, torch.searchsorted(middle, 2 * numbers.float().contiguous())).to(
        getattr(torch, code_type(table.shape[2]))
    )


def _scalar_order(points: Tensor) -> tuple[Tensor, Tensor]:
    """`[books, entries]` points on the grid -> (twice the midpoints of neighbours, `[books, entries - 1]`; the index of
    the point between two of them, `[books, entries]`)."""
    points, order = points.float().sort(dim=1, stable=True)
    order = order.gather(1, torch.searchsorted(points, points))  # of equal points the first
    # Where the upper of two points comes first in the codebook, it takes what lies in the middle.
    return points[:, 1:] + points[:, :-1] - (order[:, 1:] < order[:, :-1]).float(), order
