"""Find the widths of a transform's fields that lose least at each rate.

Losses are `[fields, 9]` float64: the expected loss of each field with codes of 0 to 8 bits. A *profile* is the widths
of the kept fields, descending; the codes of a token take 4 R bytes, R its rate. Profiles whose fields do not fit into
the words of their rate do not exist (`kvq_kernels.fields`).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

import numpy as np
from kvq_kernels.fields import MAX_WIDTH, fits
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Widths: TypeAlias = tuple[int, ...]
#: Profiles that are tried for each rate.
MAX_TRIED = 64
#: Bits of width for each unit of a profile's rate, which are as many bytes of 8 components' codes.
RATE = 4


class Profiles:
    """The best profiles for the losses of a group of channels, or for the summed losses of several.

    bounds: `[rates]`, the least loss of descending widths within each rate, 1, 2, ..., up to `limit` or 8 bits for all
    fields; that of the best profile, unless its fields do not fit into words.
    """

    def __init__(self, losses: Floats, limit: int | None = None) -> None:
        self._losses = losses
        self._best: dict[int, Widths] = {}
        self._least = _least_losses(losses)
        rates = min(len(losses) * MAX_WIDTH // RATE, limit or sys.maxsize)
        self.bounds: Floats = self._least[0, MAX_WIDTH, RATE : RATE * rates + 1 : RATE]

    def best(self, most: int) -> Widths:
        """The profile of least loss among those with a rate of at most `most`: one field of one bit at least.

        Where wide fields leave room in most words, `MAX_TRIED` profiles of less loss may not fit: then it is that of
        the next lower rate, of which the same holds.
        """
        if most not in self._best:
            tried = islice(self._by_loss(RATE * most), MAX_TRIED)
            fitting = next((profile for profile in tried if fits(profile)), None)
            self._best[most] = fitting or self.best(most - 1)
        return self._best[most]

    def loss(self, profile: Widths) -> float:
        """The expected loss with a profile."""
        widths = [*profile, *[0] * (len(self._losses) - len(profile))]
        return float(self._losses[np.arange(len(widths)), widths].sum())

    def _by_loss(self, bits: int) -> Iterator[Widths]:
        """All descending widths of at most `bits` together, by loss: A* with the exact loss of the other fields."""
        queue: list[tuple[float, Widths]] = [(0.0, ())]
        while queue:
            _, widths = heapq.heappop(queue)
            field = len(widths)
            if field == len(self._losses):
                yield tuple(width for width in widths if width)
                continue
            most = min(bits - sum(widths), widths[-1] if widths else MAX_WIDTH)
            begun = sum(float(self._losses[at, width]) for at, width in enumerate(widths))
            for width in range(0 if widths else 1, most + 1):
                left = self._least[field + 1, width, bits - sum(widths) - width]
                heapq.heappush(queue, (begun + float(self._losses[field, width] + left), (*widths, width)))


def _least_losses(losses: Floats) -> Floats:
    """The least loss of the fields from each one on, `[fields + 1, 9, bits + 1]`: with widths of at most so many bits,
    descending, that are at most so many together."""
    fields, widths = losses.shape
    least = np.zeros((fields + 1, widths, fields * MAX_WIDTH + RATE + 1))
    for field in reversed(range(fields)):
        row = np.full(least.shape[2], np.inf)
        for width in range(widths):
            row[width:] = np.minimum(row[width:], losses[field, width] + least[field + 1, width, : len(row) - width])
            least[field, width] = row
    return least
