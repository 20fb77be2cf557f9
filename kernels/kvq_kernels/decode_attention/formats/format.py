"""What decode attention asks of a storage format: tensors on the host, a specification for the compiler, functions for
kernels.

A format is a `Format` (tensors), a `SideSpec` (compile-time constants and functions that kernels call through it) and,
where it has faster ways to read a tile than element by element, a `KeyReader` and a `ValueReader`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
import triton.language as tl
from torch import Tensor

from kvq_kernels.cache_keys import digest
from kvq_kernels.planar import low_bits

#: (name, tensor `[B, H, T, W]` or None, tokens of one of the T) of a format's tensors that grow with the tokens.
Stored = tuple[str, Tensor | None, int]


class Format(ABC):
    """Packed tokens of one layer's keys or values, whose heads are stored alike."""

    @abstractmethod
    def stored(self) -> list[Stored]:
        """The tensors that grow with the tokens; they have pages instead of rows where a side has pages."""

    @abstractmethod
    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with `change` of each tensor of `stored`, in that order."""

    @abstractmethod
    def spec(self, dim: int, **of_side: Any) -> SideSpec:
        """Compile-time description for head_dim `dim`. of_side: the fields of `SideSpec` that are not the format's."""

    @abstractmethod
    def pointers(self) -> NamedTuple:
        """Tensors as `SideSpec.at_head` takes them. A missing one is replaced by another: it is never read, but a
        kernel's function cannot return a pointer that is None."""

    @abstractmethod
    def strides(self) -> NamedTuple:
        """Strides of rows and heads, as `SideSpec.at_head` takes them. ValueError for a layout that does not fit."""

    @abstractmethod
    def page_strides(self, heads: Mapping[str, int]) -> NamedTuple:
        """The same of tensors in pages: `heads` has the strides of heads by the names of `stored`; none of rows."""

    @abstractmethod
    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        """Dequantized numbers `[B, H, T, D]` in `dtype`. dim: D, where codes do not fill their words."""

    @property
    def heads(self) -> int | None:
        """Number of kv heads; None: not known."""
        return self._first().shape[1]

    @property
    def room(self) -> int:
        """Tokens per row that there is room for."""
        return self._first().shape[2] * self.stored()[0][2]

    def _first(self) -> Tensor:
        tensor = self.stored()[0][1]
        assert tensor is not None
        return tensor

    @property
    def product_type(self) -> torch.dtype:
        """Type that numbers are multiplied in, beside a 16-bit query: float16, whose subnormal numbers are codes."""
        return torch.float16

    def check(self, name: str) -> None:  # noqa: B027 -- most formats have nothing to check
        """ValueError for tensors of which a kernel would read only some."""


@dataclass(frozen=True, kw_only=True)
class SideSpec(ABC):
    """How keys or values are stored, as a compile-time constant of a kernel, which reads its fields as attributes.

    dim: head_dim. tokens, channels: of a code's block. bits: of a code. scale_tokens: that share a scale per channel.

    Functions of a format, called by kernels:
    at_head(packed, strides, S, row, head): pointers at a row and kv head; with strides of pages, at page 0.
    at_page(packed, S, offset): pointers `offset` bytes further.
    element(packed, S, token, channel, mask): float32 [tokens, channels], packed numbers [tokens, 1] x [1, channels],
    dequantized; any number where not `mask`.
    """

    #: How much work a number takes beside other formats: the tuned tile is that of the side with more.
    work: ClassVar[int]
    #: Whether packed numbers are codes, multiplied on matrix units with as many columns as these take.
    coded: ClassVar[bool] = True
    #: Whether the main loop is long, with fences between its loads; its tiles are then not cut to groups of scales.
    fences_loads: ClassVar[bool] = False
    at_head: ClassVar[Any]
    at_page: ClassVar[Any]
    element: ClassVar[Any]

    dim: int
    tokens: int = 1
    channels: int = 1
    bits: int = 8
    scale_tokens: int = 1
    ring: bool = False  # recent tokens are in a ring buffer
    normed: bool = False  # sinks and recent tokens are divided by a norm per channel when they are read
    outliers: int = 0  # capacity of a block's outlier list
    outlier_block: int = 1  # tokens of that block
    pooled_heads: int = 0  # heads whose outliers share one list; 0: each head has its list
    fenced: bool = True  # scheduling fences between loads of codebook entries (see `codebook/vector.py`)
    nvidia: bool = True  # PTX assembly may be used
    cell: int = 0  # packed tokens are in pages (`parts.Pages`), so many in a contiguous run; 0: a row is one run
    cells: int = 1  # such runs of a page
    first: int = 0  # place of packed token 0 in pages

    def key_reader(self, tokens: int, style: str, width: int, dtype: tl.dtype) -> KeyReader | None:
        """How tiles of so many keys are read; None: element by element. style, width: of RoPE. dtype: of products."""
        return None

    def value_reader(self, tokens: int, dtype: tl.dtype) -> ValueReader | None:
        """How tiles of so many values are read; None: element by element."""
        return None

    @property
    def field_bits(self) -> int:
        """Bits of a code in its field of a word; the third bits of 3-bit codes are in words of their own."""
        return low_bits(self.bits)

    @property
    def opaque_tiles(self) -> bool:
        """Whether the compiler must not compute a tile's number within its page ahead: fences depend on it."""
        return self.fences_loads or self.outliers > 0

    @property
    def bytes_ahead(self) -> int:
        """Bytes of a token that are loaded ahead into shared memory, with channels padded."""
        return 0

    @abstractmethod
    def shape_class(self, other: SideSpec) -> str:
        """Key of the tuning table for this side and another, whose `work` is not more."""

    @property
    def cache_key(self) -> str:
        """Part of Triton's key of a compiled kernel, see `cache_keys`."""
        return f"{self!r}-{digest(type(self).at_head, type(self).at_page, type(self).element)}"


@dataclass(frozen=True, repr=False)
class Reader:
    """How the main loop reads tiles of a side. name: unique; it stands for the reader where kernels are named.

    subtiles: it reads subtiles of 16 tokens, see `subtiles.py`; else whole tiles.
    """

    name: str
    subtiles: bool

    def __repr__(self) -> str:
        return self.name

    @property
    def cache_key(self) -> str:
        """As `SideSpec.cache_key`."""
        return digest(*(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, repr=False)
class KeyReader(Reader):
    """How the main loop reads tiles of keys. Functions for kernels; C is a `TileLoop`, k the format's pointers:

    table(k, C): what stays in registers. queries(q, C): operands.
    scores(queries, table, k, tile, rope, start, C): tuple of L tensors float32 [M, R], q . k of tile `tile`; start:
    position of packed token 0.
    """

    table: Any
    queries: Any
    scores: Any


@dataclass(frozen=True, repr=False)
class ValueReader(Reader):
    """How the main loop reads tiles of values. Functions for kernels; C is a `TileLoop`, v the format's pointers:

    table(v, C): what stays in registers. init(C): an empty accumulator.
    prefetch(v, tile, C): loads that overlap with the softmax.
    accumulate(acc, p, alpha, prefetched, table, v, tile, C): acc alpha + p V; p: L tensors [M, R].
    store(acc, out, l_i, C): acc / l_i at the pointers `out` [M].

    Of an accumulator whose sums are corrected for outliers: tiles(C), their number; steps(i, C), distances in channels
    from row 0 of tile 0 to rows 0, 8, ... of tile i; channel(thread, C), of row 0 of tile 0 in each of 8 threads;
    transposed: tiles are [M, channels], else [channels, M]; paired: it is (tiles, more); crowded: values fill the
    registers.
    """

    table: Any
    init: Any
    prefetch: Any
    accumulate: Any
    store: Any
    tiles: Any = None
    steps: Any = None
    channel: Any = None
    transposed: bool = False
    paired: bool = False
    crowded: bool = False


@dataclass(frozen=True)
class TileLoop:
    """Compile-time constants of the main loop over a side's tiles.

    S: the side. reader: of its tiles. T: type of products. STYLE, WIDTH: of RoPE. GROUP: query heads; M: the same,
    padded. N: tokens of a tile, in L subtiles of R, whose codes have BLOCK tokens. E: channels of a column tile.
    PRECISION: of float32 products.
    """

    S: Any  # a `SideSpec`
    reader: KeyReader | ValueReader
    T: tl.dtype
    STYLE: str
    WIDTH: int
    GROUP: int
    M: int
    N: int
    E: int
    L: int
    R: int
    BLOCK: int
    PRECISION: str

    @property
    def cache_key(self) -> str:
        """As `SideSpec.cache_key`."""
        return f"{self!r}-{self.S.cache_key}-{self.reader.cache_key}"


def head_strides(tensor: Tensor) -> tuple[int, int]:
    """Strides of (row, head) of `[B, H, T, n]`. ValueError unless the tokens of a head are contiguous; the stride of an
    axis of length 1 means nothing."""
    expected = ((2, tensor.shape[3]), (3, 1))
    if any(tensor.shape[axis] > 1 and tensor.stride(axis) != stride for axis, stride in expected):
        raise ValueError(f"the tokens of a head must be contiguous, not of strides {tensor.stride()}")
    return tensor.stride(0), tensor.stride(1)
