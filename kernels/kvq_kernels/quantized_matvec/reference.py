"""The products in plain PyTorch: unpack everything, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.decode_attention.reference import unpack_uniform


def quantized_matvec_reference(vectors: Tensor, packed: Uniform, side: str, dtype: torch.dtype) -> Tensor:
    """`[B, Q, D] -> [B, Q, T]` with keys (Eq. 3), `[B, Q, T] -> [B, Q, D]` with values (Eq. 5), in `dtype`.

    Packed numbers are decoded in float32 (in float64 if `dtype` is) and rounded to `dtype`, as by a cache that
    decompresses.
    """
    numbers = unpack_uniform(packed, torch.promote_types(dtype, torch.float32)).to(dtype)  # [B, H, T, D]
    grouped = vectors.to(dtype).unflatten(1, (numbers.shape[1], -1))  # [B, H, Q / H, D or T]
    return (grouped @ (numbers.mT if side == "keys" else numbers)).flatten(1, 2)
