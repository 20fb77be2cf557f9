"""The identity codec: no quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class IdentityCodec(Codec):
    """Stores numbers unchanged, in their dtype. Part: `raw` `[B, H, T, D]`."""

    block_tokens = 1
    nominal_bits = 16.0
    unread_by_kernels = None
    read_as_latents = "kv"

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return Layout({"raw": PartSpec(heads, 1, (dim,), dtype)})

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Dense

        return Dense(parts["raw"].tensor)

    def _encode(self, x: Tensor) -> Packed:
        return Packed(x.shape[2], {"raw": Part(x.clone(memory_format=torch.contiguous_format), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed.parts["raw"].tensor.to(dtype)
