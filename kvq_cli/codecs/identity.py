"""The codec that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.codecs.base import Codec, Packed, Part


class IdentityCodec(Codec):
    """Keeps the numbers as they are, in the dtype in which they come. Part: `raw` `[B, H, T, D]`."""

    block_tokens = 1
    nominal_bits = 16.0

    def _encode(self, x: Tensor) -> Packed:
        return Packed(x.shape[2], {"raw": Part(x.clone(memory_format=torch.contiguous_format), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed.parts["raw"].tensor.to(dtype)
