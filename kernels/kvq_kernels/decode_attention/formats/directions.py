"""Scalar codes of a token's direction and its norm (TurboQuant)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_kernels.decode_attention.by_element import init, queries, store, tile_count
from kvq_kernels.decode_attention.formats.codebook.byte_permute import fields, load_table
from kvq_kernels.decode_attention.formats.codebook.scalar import (
    decode_key_fields,
    fields_per_product,
    paired_field,
    product_operand,
    unrotated_queries,
)
from kvq_kernels.decode_attention.formats.codes import load_code, unpack_words
from kvq_kernels.decode_attention.formats.format import Format, KeyReader, SideSpec, Stored, ValueReader, head_strides
from kvq_kernels.decode_attention.formats.shared import moved, no_prefetch, nothing
from kvq_kernels.decode_attention.tiles import column_tiles
from kvq_kernels.planar import high_words, low_words

#: Channels of a token whose squares are summed at a time.
COLUMNS = tl.constexpr(32)


class DirectionPointers(NamedTuple):
    """A `Directions` in a kernel."""

    codes: Any
    norm: Any
    centroids: Any


class DirectionStrides(NamedTuple):
    """Strides of rows (None: of pages) and heads."""

    codes_row: int | None
    codes_head: int
    norm_row: int | None
    norm_head: int


@triton.jit
def at_head(packed, strides, S: tl.constexpr, row, head):
    """See `SideSpec`."""
    h = head.to(tl.int64)
    codes, norm = packed.codes + h * strides.codes_head, packed.norm + h * strides.norm_head
    if strides.codes_row is not None:
        r = row.to(tl.int64)
        codes, norm = codes + r * strides.codes_row, norm + r * strides.norm_row
    return DirectionPointers(codes, norm, packed.centroids)


@triton.jit
def at_page(packed, S: tl.constexpr, offset):
    """See `SideSpec`."""
    return DirectionPointers(moved(packed.codes, offset), moved(packed.norm, offset), packed.centroids)


@triton.jit
def centroids_of(packed, S: tl.constexpr, token, channel, mask):
    """float32 [tokens, channels]: centroids of the codes, 0 where not `mask`."""
    code = load_code(packed.codes, token, channel, S.words, S.row, S.dim, S.bits, mask)
    return tl.load(packed.centroids + code, mask=mask, other=0.0)


@triton.jit
def element(packed, S: tl.constexpr, token, channel, mask):
    """See `SideSpec`."""
    inside = tl.max(mask.to(tl.int32), axis=1)[:, None] > 0
    return centroids_of(packed, S, token, channel, mask) * scales_of(packed, S, token, inside)


@triton.jit
def scales_of(packed, S: tl.constexpr, token, mask):
    """float32 [tokens, 1]: norms, divided by the length of the centroids with `unit`; 0 where not `mask`."""
    scale = tl.load(packed.norm + token, mask=mask, other=0.0).to(tl.float32)
    if S.unit:
        D: tl.constexpr = S.dim
        squares = tl.zeros([token.shape[0], 1], tl.float32)
        for j in tl.static_range((D + COLUMNS - 1) // COLUMNS):
            column = j * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            x = centroids_of(packed, S, token, column, mask & (column < D))
            squares += tl.sum(x * x, axis=1)[:, None]
        scale *= tl.where(squares > 0, tl.rsqrt(squares), 0.0)
    return scale


@triton.jit
def scores(queries, table, k, tile, rope, start, C: tl.constexpr):
    """See `KeyReader`: q . (n c) = n (q . c), with n divided by the length of c, which is summed on the way."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    E: tl.constexpr = C.E
    token = (tile * N + tl.arange(0, N))[:, None]
    qk = tl.zeros([N, M], tl.float32)
    squares = tl.zeros([N, 1], tl.float32)
    for j in tl.static_range(column_tiles(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        x = centroids_of(k, S, token, channel, channel < S.dim)
        qk = tl.dot(x.to(C.T), tl.trans(queries[j].to(C.T)), qk, input_precision=C.PRECISION)
        squares += tl.sum(x * x, axis=1)[:, None]
    scale = tl.load(k.norm + token).to(tl.float32)
    if S.unit:
        scale *= tl.rsqrt(squares)
    return (tl.trans(qk * scale),)


@triton.jit
def lookup_queries(q, C: tl.constexpr):
    """The queries as right operands of products with fields of words."""
    S: tl.constexpr = C.S
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    T: tl.constexpr = C.T
    return unrotated_queries(q, S, (), 0, "none", 0, GROUP, M, T)


@triton.jit
def lookup_scores(queries, table, k, tile, rope, start, C: tl.constexpr):
    """`scores`, with centroids that are looked up in registers, as operands of products."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    N: tl.constexpr = C.N
    PER: tl.constexpr = fields_per_product(S)
    line = tl.arange(0, N // 8)[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    x = decode_key_fields(k.codes + tile * N * S.row, table, S, line)
    squares = tl.zeros(x[0].shape, tl.float32)
    first, second = (), ()
    for j in tl.static_range(fields(S) // 2):
        x1, x2 = x[paired_field(S, 0, j, False)], x[paired_field(S, 0, j, True)]
        squares += x1.to(tl.float32) * x1.to(tl.float32) + x2.to(tl.float32) * x2.to(tl.float32)
        first, second = first + (x1,), second + (x2,)
    qk = tl.zeros([N, M], tl.float32)
    for j in tl.static_range(0, fields(S) // 2, PER):
        a1, a2 = product_operand(first, j, S, N // 8, 8), product_operand(second, j, S, N // 8, 8)
        qk = tl.dot(a1, queries[2 * j // PER], qk, input_precision=C.PRECISION)
        qk = tl.dot(a2, queries[2 * j // PER + 1], qk, input_precision=C.PRECISION)
    scale = tl.load(k.norm + (tile * N + tl.arange(0, N))).to(tl.float32)
    if S.unit:
        scale *= tl.rsqrt(tl.reshape(tl.sum(tl.sum(squares, axis=3), axis=2), [N]))
    return (tl.trans(qk) * scale[None, :],)


@triton.jit
def accumulate(acc, p, alpha, prefetched, table, v, tile, C: tl.constexpr):
    """See `ValueReader`: column tiles [M, E]; a token's scale is computed once."""
    S: tl.constexpr = C.S
    N: tl.constexpr = C.N
    E: tl.constexpr = C.E
    T: tl.constexpr = C.T
    token = (tile * N + tl.arange(0, N))[:, None]
    scale = scales_of(v, S, token, token >= 0)
    new = ()
    for j in tl.static_range(tile_count(C)):
        channel = (j * E + tl.arange(0, E))[None, :]
        x = centroids_of(v, S, token, channel, channel < S.dim) * scale
        new = new + (tl.dot(p[0].to(T), x.to(T), acc[j] * alpha[:, None], input_precision=C.PRECISION),)
    return new


KEYS = KeyReader("directions.keys", subtiles=False, table=nothing, queries=queries, scores=scores)
LOOKED_UP = KeyReader(
    "directions.looked_up", subtiles=False, table=load_table, queries=lookup_queries, scores=lookup_scores
)
VALUES = ValueReader(
    "directions.values",
    subtiles=False,
    table=nothing,
    init=init,
    prefetch=no_prefetch,
    accumulate=accumulate,
    store=store,
)


@dataclass(frozen=True, kw_only=True)
class DirectionsSpec(SideSpec):
    """Specification of `Directions`, with its unit. words: int32 words of a token; of 3-bit codes: of the low bits."""

    work: ClassVar[int] = 1
    at_head: ClassVar[Any] = at_head
    at_page: ClassVar[Any] = at_page
    element: ClassVar[Any] = element

    words: int
    unit: bool

    @property
    def entries(self) -> int:
        """Centroids."""
        return 1 << self.bits

    @property
    def row(self) -> int:
        """Words of a token."""
        return self.words + high_words(self.bits, self.dim)

    def shape_class(self, other: SideSpec) -> str:
        return f"directions/{self.bits}bit"

    def key_reader(self, tokens: int, style: str, width: int, dtype: tl.dtype) -> KeyReader | None:
        if style != "none" or self.outliers or tokens % 16:
            return None
        whole = self.nvidia and self.words in (4, 8, 16, 32) and self.words * fields(self) == self.dim
        return LOOKED_UP if whole and self.bits > 1 and dtype == tl.float16 else KEYS

    def value_reader(self, tokens: int, dtype: tl.dtype) -> ValueReader | None:
        return None if self.outliers else VALUES


@dataclass(frozen=True)
class Directions(Format):
    """Centroids of a token's coordinates, none of which is 0, and its norm: x' = n c[q], with `unit` over ||c[q]||.

    codes: int32 words `[B, H, T, W]`, planar as those of `Uniform`. norm: floating `[B, H, T, 1]`.
    centroids: float32 `[2^bits]`, for all channels and heads.
    """

    codes: Tensor
    norm: Tensor
    centroids: Tensor
    bits: int
    unit: bool = True

    def stored(self) -> list[Stored]:
        return [("codes", self.codes, 1), ("norm", self.norm, 1)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Directions:
        return replace(self, codes=change(self.codes), norm=change(self.norm))

    def spec(self, dim: int, **of_side: Any) -> DirectionsSpec:
        return DirectionsSpec(dim=dim, words=low_words(self.bits, dim), bits=self.bits, unit=self.unit, **of_side)

    def pointers(self) -> DirectionPointers:
        return DirectionPointers(self.codes, self.norm, self.centroids)

    def strides(self) -> DirectionStrides:
        return DirectionStrides(*head_strides(self.codes), *head_strides(self.norm))

    def page_strides(self, heads: Mapping[str, int]) -> DirectionStrides:
        return DirectionStrides(None, heads["codes"], None, heads["norm"])

    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        assert dim is not None
        x = self.centroids.to(dtype)[unpack_words(self.codes, self.bits, dim)]
        scale = self.norm.to(dtype)
        return x * (scale / x.square().sum(-1, keepdim=True).sqrt() if self.unit else scale)
