"""Numbers clamped to a quantile of their token's magnitudes, before any codec (OSCAR)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ClippedCodec(Codec):
    """`base` encodes x clamped to [-t, t], where t is number floor(ratio * head_dim), counted from 0, of the ascending
    magnitudes of a token's head, at most the last. Parts are those of `base`, which decodes them."""

    def __init__(self, base: Codec, ratio: float) -> None:
        self.base, self._ratio = base, ratio
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    @property
    def unread_by_kernels(self) -> str | None:
        return self.base.unread_by_kernels

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        return self.base.kernel_storage(parts, rotation)

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self.base.layout(heads, dim, dtype)

    def check(self, packed: Packed) -> None:
        self.base.check(packed)

    @property
    def capturable(self) -> bool:
        return self.base.capturable

    def _encode(self, x: Tensor) -> Packed:
        place = min(int(self._ratio * x.shape[3]), x.shape[3] - 1)
        limit = x.abs().sort(dim=3).values[..., place : place + 1]
        return self.base.encode(x.minimum(limit).maximum(-limit))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.base.decode(packed, dtype)
