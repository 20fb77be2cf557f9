"""Principal components of all layers together, and the groups of least squared error that code them (KVTC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvq_cli.codecs.component_groups import BITS, SIZES, ComponentGroups, Group

#: Training tokens, evenly spaced, whose covariance is decomposed, at most.
MAX_TOKENS = 1 << 14
#: Tokens, evenly spaced among these, on which the errors of groups are measured, at most.
GROUP_TOKENS = 1 << 11
#: Components of less than this share of the variance of the first are those of rounding.
_LEAST = 1e-10
#: Numbers that are quantized at a time.
_TILE = 1 << 22
#: By group, its squared errors at every start, in units of `SIZES[0]` components.
Errors: TypeAlias = Mapping[Group, NDArray[np.float64]]


def principal_components(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[p]` and orthonormal basis `[p, rank]`, float64, of the tokens `x` `[N, p]` float32, components by
    descending variance; rank is a multiple of `SIZES[0]`, at most p and N - 1.

    Decomposes the covariance, or, for fewer tokens than numbers, the products of tokens, which has the same nonzero
    eigenvalues.
    """
    tokens, width = x.shape
    mean = x.mean(0, dtype=torch.float64)
    centered = x - mean.float()
    gram = (centered.T @ centered if tokens > width else centered @ centered.T).double()
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    rank = int((values[: min(width, tokens - 1)] > _LEAST * values[0]).sum()) // SIZES[0] * SIZES[0]
    basis = vectors[:, :rank]
    if tokens <= width:
        basis = torch.linalg.qr(centered.T.double() @ basis).Q
    # The sign of an eigenvector is arbitrary: make its largest number positive, so that all libraries agree.
    return mean, basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()


def group_errors(z: Tensor, dtype: str, words: int) -> Errors:
    """Squared errors of all groups of at most `words` words, summed over the tokens `z` `[N, rank]` float32."""
    units, errors = z.shape[1] // SIZES[0], {}
    for group in (Group(size, bits) for size in SIZES for bits in BITS):
        starts = units - group.components // SIZES[0] + 1
        if starts < 1 or group.words > words:
            continue
        coding = ComponentGroups([group] * starts, dtype)
        windows = z.unfold(1, group.components, SIZES[0])  # [N, starts, components]
        total = torch.zeros(starts, dtype=torch.float64, device=z.device)
        for tile in windows.split(max(1, _TILE // (starts * group.components))):
            numbers = tile.flatten(1)[None, None]
            lost = coding.decode(coding.encode(numbers)) - numbers
            total += lost.double().square_().view(len(tile), starts, -1).sum((0, 2))
        errors[group] = total.cpu().numpy()
    return errors


def best_groups(errors: Errors, energies: Sequence[float] | NDArray[np.float64], words: int) -> list[Group]:
    """The groups of adjacent components, from the first on, of least squared error within `words` words, by dynamic
    programming; those behind the last are dropped. energies: squared components, by unit of `SIZES[0]`."""
    units = len(energies)
    least = np.full((units + 1, words + 1), np.inf)
    least[0] = 0  # [units coded, words]: with at most so many words
    chosen = np.full(least.shape, -1, dtype=np.int32)
    candidates = list(errors)
    for unit in range(units):
        for number, group in enumerate(candidates):
            stop = unit + group.components // SIZES[0]
            if stop > units or group.words > words:
                continue
            found = least[unit, : words + 1 - group.words] + errors[group][unit]
            better = found < least[stop, group.words :]
            least[stop, group.words :][better] = found[better]
            chosen[stop, group.words :][better] = number
    dropped = np.append(np.cumsum(np.asarray(energies)[::-1])[::-1], 0)
    unit, left, groups = int(np.argmin(least[:, words] + dropped)), words, []
    while unit:
        group = candidates[chosen[unit, left]]
        groups.append(group)
        unit, left = unit - group.components // SIZES[0], left - group.words
    return groups[::-1]


def evenly(x: Tensor, most: int) -> Tensor:
    """At most `most` rows, evenly spaced."""
    return x[:: -(-len(x) // most)]
