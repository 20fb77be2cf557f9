"""Nearest of 256 centroids for keys and values of one layer at Llama-3.1-8B's shape: what encoding a prompt takes."""

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
#: Numbers of a block: 4, 2 and 1 bits per number.
BLOCKS = (2, 4, 8)
SIDES = 2


class AssignCentroids:
    """A case is keys and values, one after the other, with a codebook per channel (blocks of tokens)."""

    operation = "assign_centroids"
    tuned_at = LENGTHS.index(131072)

    def groups(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        books = sizes.pick(HEADS * DIM, 2, 64)
        for length in sizes.pick(LENGTHS, (128,), (1024,)):
            cases = []
            for block in BLOCKS:
                given = books, length, block, device
                nbytes = SIDES * books * length * 4 + SIDES * books * length // block
                error = partial(_excess, *given)
                cases.append(Case(f"blocks of {block}", partial(_assign, *given), nbytes, error=error))
            yield {"context": length}, cases


def _operands(books: int, length: int, block: int, device: torch.device, seed: int) -> list[tuple[Tensor, Tensor]]:
    random = generator(device, seed)
    sizes = (books, length // block, block), (books, ENTRIES, block)
    return [tuple(random_tensor(size, torch.float32, random) for size in sizes) for _ in range(SIDES)]


def _assign(books: int, length: int, block: int, device: torch.device, seed: int) -> Callable[[], list]:
    operands = _operands(books, length, block, device, seed)
    return lambda: [assign_centroids(*one, backend="triton") for one in operands]


def _excess(books: int, length: int, block: int, device: torch.device) -> tuple[float, float]:
    """By how much the chosen centroid's score is above the least, of |u| max|c|: equally near ones may be either. The
    kernel's scores are exact to 2^-22 of that, two of them are compared."""
    points, centroids = _operands(books, length, block, device, 0)[0]
    codes, _ = assign_centroids(points, centroids, backend="triton")
    worst = 0.0
    for first in range(0, books, 64):  # so that the scores of all entries fit in memory
        u, c = points[first : first + 64].double(), centroids[first : first + 64].double()
        _, least = assign_centroids_reference(u, c)
        chosen = c.gather(1, codes[first : first + 64].long()[:, :, None].expand(-1, -1, block))
        score = chosen.square().sum(dim=2) / 2 - (u * chosen).sum(dim=2)
        scale = u.norm(dim=2) * c.norm(dim=2).amax(dim=1, keepdim=True)
        worst = max(worst, float(((score - least) / scale).max()))
    return worst, 2 * 2.0**-22
