"""Quantized matrix-vector products in plain PyTorch: unpack everything, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform


def quantized_matvec_reference(vectors: Tensor, packed: Uniform, side: str, dtype: torch.dtype) -> Tensor:
    """Q K^T, `[B, Q, D] -> [B, Q, T]` (Eq. 3), or P V, `[B, Q, T] -> [B, Q, D]` (Eq. 5), in `dtype`.

    Packed numbers are dequantized in float32 (float64 if `dtype` is) and rounded to `dtype`, as by a cache that
    decompresses.
    """
    numbers = packed.unpack(torch.promote_types(dtype, torch.float32)).to(dtype)  # [B, H, T, D]
    grouped = vectors.to(dtype).unflatten(1, (numbers.shape[1], -1))  # [B, H, Q / H, D or T]
    return (grouped @ (numbers.mT if side == "keys" else numbers)).flatten(1, 2)
