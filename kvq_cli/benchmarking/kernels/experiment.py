"""The interface of kernel benchmarks: an `Experiment` gives shapes, each with `Case`s that compute the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """An implementation of the experiment's operation at one shape.

    make: from a seed, allocates random operands and returns a function that computes the result from them.
    nbytes: the bytes that a call must read or write. baseline: a 16-bit implementation; ratios are to the fastest one.
    error: returns the largest error and the largest allowed one; None for implementations of other libraries.
    extra: further columns of the result row.
    """

    name: str
    make: Callable[[int], Callable[[], Any]]
    nbytes: int
    baseline: bool = False
    error: Callable[[], tuple[float, float]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The sizes of operands. dry: tiny ones for Triton's interpreter on a CPU. small: short contexts that launch the
    same kernels as full sizes, for checks."""

    dry: bool
    small: bool = False

    def pick(self, full: T, dry: T, small: T | None = None) -> T:
        """Return the value for these sizes; without `small`, small sizes use the full one."""
        if self.dry:
            return dry
        return small if self.small and small is not None else full

    @property
    def to_check(self) -> Sizes:
        """The sizes at which the kernels of these sizes are checked."""
        return replace(self, small=True)


class Experiment(Protocol):
    """A benchmark of one operation. operation: its folder in kvq_kernels. tuned_at: index of the shape that `tune`
    times."""

    operation: str
    tuned_at: int

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        """Yield each shape with its cases, small shapes first; memory is allocated by `Case.make`."""


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a random generator on `device` with this seed."""
    return torch.Generator(device).manual_seed(seed)


def random_tensor(size: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Return normally distributed numbers, or uniform ones over the range of an integer type."""
    if dtype.is_floating_point:
        return torch.randn(size, dtype=dtype, device=random.device, generator=random)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, size, dtype=dtype, device=random.device, generator=random)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |found - exact| / |exact| (L2 norms, float64); infinity if `found` has a non-finite number."""
    if not bool(found.isfinite().all()):
        return float("inf")
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())
