"""What a measurement of kernels consists of: cases that compute the same at one shape, each with its check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Case:
    """One way to compute the experiment's product at one shape.

    make:     called with a number, gives a call that computes it over memory of its own, filled from that number.
    nbytes:   that a call must read or write. baseline: the 16-bit ways, of which the fastest is compared with.
    error:    largest error, and the largest that is right; None where it is not kvq's to check.
    """

    name: str
    make: Callable[[int], Callable[[], Any]]
    nbytes: int
    baseline: bool = False
    error: Callable[[], tuple[float, float]] | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """dry: so small that a CPU computes them in Triton's interpreter. small: the kernels that full sizes launch, on
    short texts: to check them."""

    dry: bool
    small: bool = False

    def pick(self, full: Any, dry: Any, small: Any = None) -> Any:
        """small: where it is not the full size."""
        if self.dry:
            return dry
        return small if self.small and small is not None else full

    @property
    def to_check(self) -> Sizes:
        """Sizes at which the kernels of these sizes are checked."""
        return replace(self, small=True)


class Experiment(Protocol):
    """operation: the folder of kvq_kernels that it measures. tuned_at: number of the group that is tuned for."""

    operation: str
    tuned_at: int

    def groups(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        """(shape, the cases at it), small first; memory is taken when a case is made."""


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def random_tensor(size: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Normal numbers, or all bits of an integer type."""
    if dtype.is_floating_point:
        return torch.randn(size, dtype=dtype, device=random.device, generator=random)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, size, dtype=dtype, device=random.device, generator=random)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all numbers together, against float64; infinite where one is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())
