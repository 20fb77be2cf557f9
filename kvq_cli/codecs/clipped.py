"""Numbers clamped to a quantile of their token's magnitudes, before any codec (OSCAR)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.wrapped import WrappedCodec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ClippedCodec(WrappedCodec):
    """`base` encodes x clamped to [-t, t], where t is number floor(ratio * head_dim), counted from 0, of the ascending
    magnitudes of a token's head, at most the last. Parts are those of `base`, which decodes them."""

    def __init__(self, base: Codec, ratio: float) -> None:
        super().__init__(base)
        self._ratio = ratio

    @property
    def unread_by_kernels(self) -> str | None:
        return self.base.unread_by_kernels

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        return self.base.kernel_storage(parts, rotation)

    def _encode(self, x: Tensor) -> Packed:
        place = min(int(self._ratio * x.shape[3]), x.shape[3] - 1)
        limit = x.abs().sort(dim=3).values[..., place : place + 1]
        return self.base.encode(x.minimum(limit).maximum(-limit))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.base.decode(packed, dtype)
