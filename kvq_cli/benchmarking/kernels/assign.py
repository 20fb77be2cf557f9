"""Assignment to the nearest of 256 centroids for one layer of Llama-3.1-8B: the time to encode a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvq_kernels.assign_centroids import assign_centroids
from kvq_kernels.assign_centroids.reference import assign_centroids_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor

HEADS, DIM, ENTRIES = 8, 128, 256
LENGTHS = (8192, 32768, 131072)
#: Numbers per block: 4, 2 and 1 bits per number.
BLOCKS = (2, 4, 8)
#: Keys and values.
SIDES = 2


class AssignCentroids:
    """A case assigns keys, then values, with a codebook per channel (blocks of tokens)."""

    operation = "assign_centroids"
    tuned_at = LENGTHS.index(131072)

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        books = sizes.pick(HEADS * DIM, 2, 64)
        for length in sizes.pick(LENGTHS, (128,), (1024,)):
            cases = []
            for block in BLOCKS:
                nbytes = SIDES * books * length * 4 + SIDES * books * length // block
                make = partial(_assign, books, length, block, device)
                error = partial(_excess_score, books, length, block, device)
                cases.append(Case(f"blocks of {block}", make, nbytes, error=error))
            yield {"context": length}, cases


def _operands(books: int, length: int, block: int, device: torch.device, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return (points `[books, blocks, block]`, centroids `[books, entries, block]`) of keys and of values, float32."""
    random = generator(device, seed)
    points, centroids = (books, length // block, block), (books, ENTRIES, block)
    return [
        (random_tensor(points, torch.float32, random), random_tensor(centroids, torch.float32, random))
        for _ in range(SIDES)
    ]


def _assign(books: int, length: int, block: int, device: torch.device, seed: int) -> Callable[[], list[Any]]:
    operands = _operands(books, length, block, device, seed)
    return lambda: [assign_centroids(points, centroids, backend="triton") for points, centroids in operands]


def _excess_score(books: int, length: int, block: int, device: torch.device) -> tuple[float, float]:
    """Return the largest excess of a chosen centroid's score over the least score, relative to |u| max|c|, and its
    limit. Scores, not codes, are compared because centroids may be equally near. The limit is twice the kernel's error
    of one score, 2^-22."""
    points, centroids = _operands(books, length, block, device, 0)[0]
    codes, _ = assign_centroids(points, centroids, backend="triton")
    worst = 0.0
    for first in range(0, books, 64):  # bounds the memory for the scores of all entries
        u, c = points[first : first + 64].double(), centroids[first : first + 64].double()
        _, least = assign_centroids_reference(u, c)
        chosen = c.gather(1, codes[first : first + 64].long()[:, :, None].expand(-1, -1, block))
        score = chosen.square().sum(dim=2) / 2 - (u * chosen).sum(dim=2)
        scale = u.norm(dim=2) * c.norm(dim=2).amax(dim=1, keepdim=True)
        worst = max(worst, float(((score - least) / scale).max()))
    return worst, 2 * 2.0**-22
