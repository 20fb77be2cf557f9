"""Numbers that are not quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_kernels.decode_attention.formats.format import Format, SideSpec, Stored, head_strides
from kvq_kernels.decode_attention.formats.shared import moved
from kvq_kernels.decode_attention.rope import padded_dim


class DensePointers(NamedTuple):
    """A `Dense` in a kernel."""

    numbers: Any


class DenseStrides(NamedTuple):
    """Strides of a row (None: of pages) and of a head."""

    row: int | None
    head: int


@triton.jit
def at_head(packed, strides, S: tl.constexpr, row, head):
    """See `SideSpec`."""
    h = head.to(tl.int64)
    if strides.row is None:
        return DensePointers(packed.numbers + h * strides.head)
    else:
        return DensePointers(packed.numbers + row.to(tl.int64) * strides.row + h * strides.head)


@triton.jit
def at_page(packed, S: tl.constexpr, offset):
    """See `SideSpec`."""
    return DensePointers(moved(packed.numbers, offset))


@triton.jit
def element(packed, S: tl.constexpr, token, channel, mask):
    """See `SideSpec`."""
    return tl.load(packed.numbers + token * S.dim + channel, mask=mask, other=0.0).to(tl.float32)


@dataclass(frozen=True, kw_only=True)
class DenseSpec(SideSpec):
    """Specification of `Dense`. itemsize: bytes of a number."""

    work: ClassVar[int] = 0
    coded: ClassVar[bool] = False
    at_head: ClassVar[Any] = at_head
    at_page: ClassVar[Any] = at_page
    element: ClassVar[Any] = element

    itemsize: int = 2

    @property
    def bytes_ahead(self) -> int:
        return padded_dim(self.dim) * self.itemsize

    def shape_class(self, other: SideSpec) -> str:
        return "dense"


@dataclass(frozen=True)
class Dense(Format):
    """16- or 32-bit numbers, not quantized: `[B, H, T, D]` float16, bfloat16 or float32."""

    numbers: Tensor

    def stored(self) -> list[Stored]:
        return [("numbers", self.numbers, 1)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Dense:
        return Dense(change(self.numbers))

    def spec(self, dim: int, **of_side: Any) -> DenseSpec:
        return DenseSpec(dim=dim, itemsize=self.numbers.element_size(), **of_side)

    def pointers(self) -> DensePointers:
        return DensePointers(self.numbers)

    def strides(self) -> DenseStrides:
        return DenseStrides(*head_strides(self.numbers))

    def page_strides(self, heads: Mapping[str, int]) -> DenseStrides:
        return DenseStrides(None, heads["numbers"])

    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        return self.numbers.to(dtype)

    @property
    def product_type(self) -> torch.dtype:
        return self.numbers.dtype
