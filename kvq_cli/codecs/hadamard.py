"""Orthonormal Hadamard transforms along the last dimension, by additions in a fixed order.

A number's transform is the same alone and among others: nothing but elementwise additions in a fixed order is
computed, where a matrix product may round differently for other shapes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Orders of the base matrices: 1, and q + 1 for primes q = 3 (mod 4), by Paley's first construction.
BASES = (1, 12, 20)


def factors(width: int) -> tuple[int, int]:
    """(base, n) with width = base * n, a base of `BASES` and n a power of two; UsageError where there is none."""
    for base in BASES:
        power, rest = divmod(width, base)
        if not rest and power and power & (power - 1) == 0:
            return base, power
    raise UsageError(
        f"a Hadamard rotation of {width} channels is not built: widths are powers of two, or 12 or 20 times one (Paley)"
    )


def hadamard(x: Tensor, inverse: bool = False) -> Tensor:
    """x H^T, with H the orthonormal Hadamard matrix of the last dimension's width: Paley's matrix of order 1, 12 or 20
    times Sylvester's of a power of two (Kronecker product). inverse: x H.

    x: `[..., width]`. Returns float32 of that shape. UsageError for other widths, see `factors`.
    """
    base, power = factors(x.shape[-1])
    y = x.float().unflatten(-1, (base, power))
    step = 1
    while step < power:  # butterflies of pairs that are `step` apart
        pairs = y.unflatten(-1, (-1, 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        step *= 2
    if base > 1:
        signs = _paley_on(base, y.device)
        signs = signs if inverse else signs.T  # row i: the signs with which input i is added to each output
        total = y[..., :1, :] * signs[0].unsqueeze(1)
        for i in range(1, base):
            total = total + y[..., i : i + 1, :] * signs[i].unsqueeze(1)
        y = total
    return y.flatten(-2) * (1 / math.sqrt(x.shape[-1]))


@cache
def _paley_on(order: int, device: torch.device) -> Tensor:
    return paley(order).to(device)


@cache
def paley(order: int) -> Tensor:
    """The Hadamard matrix of order q + 1 for a prime q = 3 (mod 4), `[order, order]` of 1 and -1, float32.

    Paley's first construction: I + S, where S is skew: its first row is 1, and S[i + 1, j + 1] = 1 where i - j is a
    square modulo q, else -1.
    """
    q = order - 1
    squares = {i * i % q for i in range(1, q)}
    skew = torch.zeros(order, order, dtype=torch.float32)
    skew[0, 1:], skew[1:, 0] = 1, -1
    for i in range(q):
        for j in range(q):
            if i != j:
                skew[i + 1, j + 1] = 1 if (i - j) % q in squares else -1
    return skew + torch.eye(order, dtype=torch.float32)
