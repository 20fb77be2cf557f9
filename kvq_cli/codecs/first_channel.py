"""The first channel in 16 bits, the others by another codec (XQuant, appendix B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part, side_dtype, to_side
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FirstChannelCodec(Codec):
    """`base` encodes channels 1, 2, ...; channel 0 is stored in 16 bits as the part `first` `[B, H, T, 1]`."""

    def __init__(self, base: Codec, dtype: torch.dtype | str) -> None:
        self.base, self._dtype = base, side_dtype(dtype)
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits
        self.read_as_latents = base.read_as_latents.replace("v", "")

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        others = self.base.layout(heads, dim - 1, dtype)
        return replace(others, parts={**others.parts, "first": PartSpec(heads, 1, (1,), self._dtype)})

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        return self.base.kernel_storage(parts, rotation)  # `rematerialize` takes the first channel beside it

    def _encode(self, x: Tensor) -> Packed:
        packed = self.base.encode(x[..., 1:])
        return Packed(packed.tokens, {**packed.parts, "first": Part(to_side(x[..., :1], self._dtype), 1)})

    def check(self, packed: Packed) -> None:
        self.base.check(_others(packed))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return torch.cat([packed.parts["first"].tensor.to(dtype), self.base.decode(_others(packed), dtype)], dim=-1)


def _others(packed: Packed) -> Packed:
    """The parts of channels 1, 2, ..."""
    return Packed(packed.tokens, {name: part for name, part in packed.parts.items() if name != "first"})
