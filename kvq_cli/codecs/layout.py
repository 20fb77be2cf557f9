"""Layouts: names, shapes and dtypes of the tensors that a codec holds, from which all sizes in bytes are counted.

None of this needs PyTorch. Dtypes are named as PyTorch names them, without `torch.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Bytes of a number by dtype.
ITEMSIZE = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype of PyTorch: `float16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor. It stands for one where codecs are planned and not run.

    values: of a small table of integers that a plan depends on (`choice`, `allocation`), nested lists; None: zeros.
    """

    shape: tuple[int, ...]
    dtype: str
    values: Any = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def to(self, dtype: torch.dtype | str) -> TensorSpec:
        """The same shape in another dtype."""
        return TensorSpec(self.shape, dtype_name(dtype))

    def __getitem__(self, index: Sequence[int]) -> TensorSpec:
        """The entries `index` of the first dimension."""
        values = None if self.values is None else [self.values[i] for i in index]
        return TensorSpec((len(index), *self.shape[1:]), self.dtype, values)

    def tolist(self) -> list[Any]:
        """The values, nested as `Tensor.tolist` nests them."""
        return self.values if self.values is not None else _zeros(self.shape)


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


#: A tensor of an artifact, or what stands for it in a plan that is never run.
TensorLike: TypeAlias = "Tensor | TensorSpec"


def spec_of(tensor: TensorLike) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return tensor if isinstance(tensor, TensorSpec) else TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


@dataclass(frozen=True)
class PartSpec:
    """One stored tensor of a packed block: `[batch, heads, tokens // unit, *entry]` of `dtype`, see `Part`."""

    heads: int
    unit: int
    entry: tuple[int, ...]
    dtype: str

    def nbytes(self, tokens: int) -> int:
        """Bytes for `tokens` tokens of one row."""
        return self.heads * tokens * math.prod(self.entry) * ITEMSIZE[self.dtype] // self.unit


@dataclass(frozen=True)
class Layout:
    """All tensors of a codec.

    parts:     of a packed block.
    constants: held for all sequences, see `BlockFormat.constants`; with the tables that a CPU makes.
    state:     of one row, of a `PromptCodec`, `[rows, ...]` with rows = 1. fitted: names of those that `fit` gives, for
               a prompt of which nothing is packed.
    """

    parts: Mapping[str, PartSpec]
    constants: Mapping[str, TensorSpec] = field(default_factory=dict)
    state: Mapping[str, TensorSpec] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()
