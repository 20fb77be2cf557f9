"""Codebook entries: vectors (TemporalKV, ChannelKV) or single numbers (KVQuant).

vector.py    tiles of codes of several numbers, whose entries are loaded
scalar.py    tiles of codes of single numbers, looked up in registers by byte_permute.py
elements.py  single numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton.language as tl
from torch import Tensor

from kvq_kernels.decode_attention.formats.codebook import scalar, vector
from kvq_kernels.decode_attention.formats.codebook.byte_permute import fields
from kvq_kernels.decode_attention.formats.codebook.elements import (
    CodebookPointers,
    CodebookStrides,
    at_head,
    at_page,
    element,
)
from kvq_kernels.decode_attention.formats.codebook.vector import key_vector, value_vector
from kvq_kernels.decode_attention.formats.codes import unpack_words
from kvq_kernels.decode_attention.formats.format import (
    Format,
    KeyReader,
    SideSpec,
    Stored,
    ValueReader,
    head_strides,
)
from kvq_kernels.planar import high_words, low_words


@dataclass(frozen=True, kw_only=True)
class CodebookSpec(SideSpec):
    """Specification of `Codebook`, with its entries.

    words: int32 words of a row of planar codes; of 3-bit codes: of their low two bits; 0 for bytes. book_channels: that
    share a codebook. shared_heads: one codebook for all heads. token_scaled: a scale and a zero-point per token.
    has_zero, has_std: a mean and a standard deviation per channel.
    """

    work: ClassVar[int] = 2
    fences_loads: ClassVar[bool] = True
    at_head: ClassVar[Any] = at_head
    at_page: ClassVar[Any] = at_page
    element: ClassVar[Any] = element

    words: int
    book_channels: int
    entries: int
    shared_heads: bool = False
    fp16_centroids: bool = False
    token_scaled: bool = False
    has_zero: bool = False
    has_std: bool = False

    @property
    def row(self) -> int:
        """Bytes or words of a row of codes."""
        return self.dim // self.channels if self.bits == 8 else self.words + high_words(self.bits, self.dim)

    def shape_class(self, other: SideSpec) -> str:
        numbers = max(side.tokens * side.channels for side in (self, other))
        return f"codebook/{numbers}" + ("/outliers" if self.outliers + other.outliers else "")

    def key_reader(self, tokens: int, style: str, width: int, dtype: tl.dtype) -> KeyReader | None:
        if self._vectors(keys=True, style=style, width=width):
            return vector.KEYS
        if not self._scalars(dtype) or self.token_scaled:
            return None
        return scalar.KEYS if style == "none" or (style == "half" and width % (2 * self.words) == 0) else None

    def value_reader(self, tokens: int, dtype: tl.dtype) -> ValueReader | None:
        if self._vectors(keys=False):
            return vector.VALUES
        return scalar.VALUES if self._scalars(dtype) and not self.has_std else None

    def _vectors(self, keys: bool, style: str = "none", width: int = 0) -> bool:
        """Whether codes are 256 entries of 2, 4 or 8 float16 numbers, in whole planes, and no code has both channels of
        a rotated pair."""
        fits = self.bits == 8 and self.fp16_centroids and not self.token_scaled
        fits = fits and self.tokens * self.channels in (2, 4, 8) and self.book_channels % self.channels == 0
        if not keys:
            return fits and self.dim % (8 * value_vector(self) * self.channels) == 0
        plane = 4 * key_vector(self)
        if style == "none":
            return fits and self.dim % plane == 0
        return fits and self.dim % (2 * plane) == 0 and style == "half" and width // 2 % self.channels == 0

    def _scalars(self, dtype: tl.dtype) -> bool:
        """Whether there is one codebook of at most 16 entries for all channels, and words divide among 4 threads."""
        fits = self.nvidia and self.tokens * self.channels == 1 and self.book_channels == self.dim
        fits = fits and self.bits <= 4 and dtype == tl.float16 and self.words in (4, 8, 16, 32)
        return fits and self.words * fields(self) == self.dim


@dataclass(frozen=True)
class Codebook(Format):
    """Codebook entries: a block of l tokens by c channels is one code; x' = centroid std + mean.

    codes:     uint8 `[B, H, T / l, D / c]`; with fewer than 256 entries planar int32 words of log2(entries) bits.
    centroids: `[H or 1, D / share, entries, l * c]`, contiguous; number `j * c + i` is token j, channel i of a block.
    mean, std: float16 or float32 `[H, D]`, or None both; kernels multiply them in float16.
    token_scale, token_zero: `[B, 1, T]`, or None both: x' is then multiplied by the token's scale and its zero is added
    (KVQuant's values).
    """

    codes: Tensor
    centroids: Tensor
    block: tuple[int, int]
    mean: Tensor | None = None
    std: Tensor | None = None
    token_scale: Tensor | None = None
    token_zero: Tensor | None = None

    def stored(self) -> list[Stored]:
        per_token = (("token_scale", self.token_scale), ("token_zero", self.token_zero))
        return [
            ("codes", self.codes, self.block[0]),
            *((name, None if tensor is None else tensor.unsqueeze(-1), 1) for name, tensor in per_token),
        ]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Codebook:
        codes, scale, zero = (None if x is None else change(x) for _, x, _ in self.stored())
        assert codes is not None
        scale, zero = (None if x is None else x.squeeze(-1) for x in (scale, zero))
        return replace(self, codes=codes, token_scale=scale, token_zero=zero)

    def spec(self, dim: int, **of_side: Any) -> CodebookSpec:
        (tokens, channels), (heads, books, entries, _) = self.block, self.centroids.shape
        bits = int(math.log2(entries))
        return CodebookSpec(
            dim=dim,
            words=0 if bits == 8 else low_words(bits, dim // channels),
            bits=bits,
            tokens=tokens,
            channels=channels,
            book_channels=dim // books,
            entries=entries,
            shared_heads=heads == 1,
            fp16_centroids=self.centroids.dtype == torch.float16,
            token_scaled=self.token_scale is not None,
            has_zero=self.mean is not None,
            has_std=self.std is not None,
            **of_side,
        )

    def pointers(self) -> CodebookPointers:
        optional = (self.mean, self.std, self.token_scale, self.token_zero)
        return CodebookPointers(self.codes, self.centroids, *(self.codes if x is None else x for x in optional))

    def strides(self) -> CodebookStrides:
        return CodebookStrides(*head_strides(self.codes), 0 if self.token_scale is None else self.token_scale.stride(0))

    def page_strides(self, heads: Mapping[str, int]) -> CodebookStrides:
        return CodebookStrides(None, heads["codes"], None)

    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        tokens, channels = self.block
        heads, books, entries, _ = self.centroids.shape
        codes = self.codes.long()
        if self.codes.dtype == torch.int32:
            bits = int(math.log2(entries))
            dim = self.std.shape[-1] if self.std is not None else dim
            count = self.codes.shape[3] * 32 // bits if dim is None else dim // channels
            codes = unpack_words(self.codes, bits, count)
        book = torch.arange(codes.shape[3], device=codes.device) * books // codes.shape[3]
        head = torch.arange(codes.shape[1], device=codes.device) % heads
        blocks = self.centroids.to(dtype)[head[:, None, None], book, codes]  # [B, H, T / l, D / c, l * c]
        x = blocks.unflatten(-1, (tokens, channels)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
        if self.std is not None and self.mean is not None:
            x = x * self.std.to(dtype)[:, None] + self.mean.to(dtype)[:, None]
        if self.token_scale is not None and self.token_zero is not None:
            x = x * self.token_scale.to(dtype)[..., None] + self.token_zero.to(dtype)[..., None]
        return x

    def check(self, name: str) -> None:
        for first, second in (("mean", "std"), ("token_scale", "token_zero")):
            given = [part for part in (first, second) if getattr(self, part) is not None]
            if len(given) == 1:
                raise ValueError(f"{name} have only {given[0]} of {first} and {second}: pass both or neither")
