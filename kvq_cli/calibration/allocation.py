"""Give out 8-bit codes over the components of many transforms so that the expected loss is least, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvq_cli.codecs.chunk_codebooks import CHUNKS

Floats = NDArray[np.float64]
#: Squared error of 256 centroids for Gaussian numbers of a chunk of 1, 2, 4 and 8 components, relative to the
#: rate-distortion bound: measured with k-means on samples of equal variances.
EXCESS = {1: 3.5, 2: 2.1, 4: 1.62, 8: 1.32}


def chunk_losses(variances: Floats) -> dict[int, Floats]:
    """Expected squared error of a chunk of each length that begins at each component.

    variances: of a transform's components, descending, `[components]`. Chunk length s -> `[components - s + 1]`: the
    rate-distortion bound of s independent Gaussians at 8 bits, by reverse water-filling inside the chunk, times
    `EXCESS`; at most the chunk's variance.
    """
    losses = {}
    for size in CHUNKS:
        if size > len(variances):
            continue
        windows = np.lib.stride_tricks.sliding_window_view(variances, size)
        logs = np.log2(np.maximum(windows, 1e-300)).cumsum(axis=1)
        active = np.arange(1, size + 1)
        level = np.exp2((logs - 16.0) / active)  # theta: 8 bits over the first components of the chunk
        total = windows.sum(axis=1)
        # Components below theta get no bits: of so many first components, theta is at most the last one's variance.
        bounds = np.where(level <= windows, active * level + total[:, None] - windows.cumsum(axis=1), np.inf)
        bounds[:, 0] = np.minimum(bounds[:, 0], total)  # of zeros alone, no component is above theta
        bound = bounds.min(axis=1)
        losses[size] = np.minimum(EXCESS[size] * bound, total)
    return losses


class Layouts:
    """The least expected loss of a group of components for every number of codes, and the chunks that reach it.

    losses: `[codes + 1]`, infinite where the components are too few for so many codes; components after the last chunk
    are dropped and lose their variance.
    """

    def __init__(self, variances: Floats) -> None:
        count, by_size = len(variances), chunk_losses(variances)
        dropped = np.append(variances[::-1].cumsum()[::-1], 0.0)  # [position]: variance of all from there on
        best = np.full((count + 1, count + 1), np.inf)  # [codes, components covered]
        best[0, 0] = 0.0
        self._last = np.zeros((count + 1, count + 1), dtype=np.int8)  # length of the last chunk
        for codes in range(1, count + 1):
            for size, losses in by_size.items():
                reached = best[codes - 1, : count + 1 - size] + losses
                better = reached < best[codes, size:]
                best[codes, size:][better] = reached[better]
                self._last[codes, size:][better] = size
        totals = best + dropped
        self._covered = totals.argmin(axis=1)
        self.losses: Floats = totals.min(axis=1)

    def chunks(self, codes: int) -> list[int]:
        """The lengths of the chunks, in the order of the components."""
        lengths: list[int] = []
        covered = int(self._covered[codes])
        for left in range(codes, 0, -1):
            lengths.append(int(self._last[left, covered]))
            covered -= lengths[-1]
        return lengths[::-1]


def allocate(variances: Sequence[Floats], codes: int) -> list[list[int]]:
    """Give out `codes` codes over groups of components, each with one code at least: the lengths of each group's
    chunks, in the order of its components.

    variances: of each group's components, descending. The sum of the groups' expected losses is the least that any
    number of codes for each reaches (dynamic programming over the groups). ValueError for fewer codes than groups.
    """
    if codes < len(variances):
        raise ValueError(f"{codes} codes are too few for {len(variances)} groups")
    layouts = [Layouts(each) for each in variances]
    best = np.full(codes + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for layout in layouts:
        reached, number = np.full(codes + 1, np.inf), np.zeros(codes + 1, dtype=np.int32)
        for count in range(1, min(codes, len(layout.losses) - 1) + 1):
            total = best[: codes + 1 - count] + layout.losses[count]
            better = total < reached[count:]
            reached[count:][better] = total[better]
            number[count:][better] = count
        best = reached
        chosen.append(number)
    left, chunks = int(best.argmin()), []
    for layout, number in zip(reversed(layouts), reversed(chosen), strict=True):
        chunks.append(layout.chunks(int(number[left])))
        left -= int(number[left])
    return chunks[::-1]
