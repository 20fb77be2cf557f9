"""Uniform codes in groups (KIVI, InnerQ, SQuat and others).

keys.py, values.py  tiles as operands of matrix products, with the arithmetic of planes.py and rows.py
elements.py         single numbers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import triton.language as tl
from torch import Tensor

from kvq_kernels.decode_attention.formats.codes import unpack_words
from kvq_kernels.decode_attention.formats.format import (
    Format,
    KeyReader,
    SideSpec,
    Stored,
    ValueReader,
    head_strides,
)
from kvq_kernels.decode_attention.formats.uniform.elements import (
    UniformPointers,
    UniformStrides,
    at_head,
    at_page,
    element,
)
from kvq_kernels.decode_attention.formats.uniform.keys import KEYS
from kvq_kernels.decode_attention.formats.uniform.planes import field_shares, fields_per_plane, group_fields
from kvq_kernels.decode_attention.formats.uniform.values import VALUES
from kvq_kernels.planar import high_words, low_words

#: Groups of a token at most: zero-points of all groups, times sums of queries in two parts, are one product of 16.
MAX_GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class UniformSpec(SideSpec):
    """Specification of `Uniform`, with its bits, axis, group, level, hybrid.

    words: int32 words of a token's planar codes; of 3-bit codes: of their low two bits. sign_bits: width of a group's
    word of sign bits, 0: none. has_zero: a zero-point per group.
    """

    work: ClassVar[int] = 1
    at_head: ClassVar[Any] = at_head
    at_page: ClassVar[Any] = at_page
    element: ClassVar[Any] = element

    words: int
    axis: str
    group: int
    level: int = 0
    sign_bits: int = 0
    hybrid: bool = False
    has_zero: bool = False

    @property
    def row(self) -> int:
        """Words of a token."""
        return self.words + high_words(self.bits, self.dim)

    def shape_class(self, other: SideSpec) -> str:
        return f"uniform/{max(self.bits, other.bits)}bit"

    def key_reader(self, tokens: int, style: str, width: int, dtype: tl.dtype) -> KeyReader | None:
        return KEYS if style == "none" and self.fits_planes(tokens, keys=True) else None

    def value_reader(self, tokens: int, dtype: tl.dtype) -> ValueReader | None:
        return VALUES if self.fits_planes(tokens, keys=False) else None

    def fits_planes(self, tokens: int, keys: bool) -> bool:
        """Whether a tile of so many tokens has one scale per channel, or a plane one per token."""
        if self.outliers or self.sign_bits not in (0, 16, 32):
            return False
        if self.dim * self.field_bits % 32 or (self.bits == 3 and self.dim % 32) or tokens % 16:
            return False
        if self.axis == "channel":
            whole = self.group % tokens == 0
        else:
            whole = self.group % self.words == 0 and self.dim // self.group <= MAX_GROUPS
        return whole and group_fields(self) % (fields_per_plane(self, keys) * field_shares(self, keys)) == 0


@dataclass(frozen=True)
class Uniform(Format):
    """Uniform codes in groups: x' = q s + z (asymmetric), (q - level) s, or in a hybrid either, by the sign of s.

    codes: int32 words `[B, H, T, W]`, planar: channel c of a token is in word c % W at bit `bits * (c // W)`; 3-bit
           codes are the low 2 bits, packed so, followed by the high bit, packed so.
    scale: `[B, H, T / group, D]` (axis "channel": a group is `group` tokens of a channel) or `[B, H, T, D / group]`
           (axis "token"). zero: the same shape, any floating type, or None.
    level: without a zero, the code of 0.
    sign:  words of the scale's shape with one bit per number of the group (x' = -q s where it is set), or None. In a
           hybrid, the word (int32) of an asymmetric group is its float32 z.
    hybrid: groups with a negative scale are asymmetric with |s|; their z is in `sign`.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    axis: Literal["channel", "token"]
    group: int
    zero: Tensor | None = None
    level: int = 0
    sign: Tensor | None = None
    hybrid: bool = False

    @property
    def scale_tokens(self) -> int:
        """Tokens that share a scale."""
        return self.group if self.axis == "channel" else 1

    def stored(self) -> list[Stored]:
        groups = (("scale", self.scale), ("zero", self.zero), ("sign", self.sign))
        return [("codes", self.codes, 1), *((name, tensor, self.scale_tokens) for name, tensor in groups)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Uniform:
        codes, scale, *optional = (None if x is None else change(x) for _, x, _ in self.stored())
        assert codes is not None and scale is not None
        return replace(self, codes=codes, scale=scale, zero=optional[0], sign=optional[1])

    def spec(self, dim: int, **of_side: Any) -> UniformSpec:
        return UniformSpec(
            dim=dim,
            words=low_words(self.bits, dim),
            bits=self.bits,
            axis=self.axis,
            group=self.group,
            scale_tokens=self.scale_tokens,
            level=self.level,
            sign_bits=0 if self.sign is None else 8 * self.sign.element_size(),
            hybrid=self.hybrid,
            has_zero=self.zero is not None,
            **of_side,
        )

    def pointers(self) -> UniformPointers:
        zero, sign = (self.codes if tensor is None else tensor for tensor in (self.zero, self.sign))
        return UniformPointers(self.codes, self.scale, zero, sign)

    def strides(self) -> UniformStrides:
        for tensor in (self.zero, self.sign):
            if tensor is not None and tensor.stride() != self.scale.stride():
                raise ValueError("zero and sign must be laid out as the scale is")
        return UniformStrides(*head_strides(self.codes), *head_strides(self.scale), None, None)

    def page_strides(self, heads: Mapping[str, int]) -> UniformStrides:
        return UniformStrides(None, heads["codes"], None, heads["scale"], heads.get("zero", 0), heads.get("sign", 0))

    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        per_channel = self.axis == "channel"
        at = 2 if per_channel else 3
        codes = unpack_words(self.codes, self.bits, self.scale.shape[3] * (1 if per_channel else self.group))

        def spread(per_group: Tensor) -> Tensor:
            return per_group.repeat_interleave(self.group, dim=at)[:, :, : codes.shape[2]]

        scale = spread(self.scale).to(dtype)
        if self.hybrid:
            asymmetric = spread(self.scale).signbit()
        else:
            asymmetric = torch.full_like(scale, self.zero is not None, dtype=torch.bool)
        number = codes.to(dtype) - self.level
        if self.sign is not None:
            position = torch.arange(codes.shape[at], device=codes.device) % self.group
            negative = (spread(self.sign).long() >> (position[:, None] if per_channel else position)) & 1
            number = torch.where(negative == 1, -number, number)
        number = number * scale
        zero = self.sign.view(torch.float32) if self.hybrid and self.sign is not None else self.zero
        if zero is None:
            return number
        return torch.where(asymmetric, codes.to(dtype) * scale.abs() + spread(zero).to(dtype), number)
