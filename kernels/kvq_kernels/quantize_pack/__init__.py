"""Uniform quantization of keys or values in groups, and bit packing, in one launch (InnerQ, Eq. 10-13).

`layout.py` describes the result, `kernel.py` computes it, `launch.py` has its arguments, `reference.py` the same in
PyTorch. `decode_attention` reads the result.
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.quantize_pack.launch import run_kernel, unsupported
from kvq_kernels.quantize_pack.layout import Layout
from kvq_kernels.quantize_pack.reference import quantize_pack_reference

__all__ = ["Layout", "Uniform", "quantize_pack", "unsupported"]


def quantize_pack(
    x: Tensor,
    layout: Layout,
    *,
    backend: Backend = "auto",
    tile: dict[str, int] | None = None,
) -> Uniform:
    """Quantized and packed `x` `[B, H, T, D]` (float16, bfloat16 or float32), as `decode_attention` reads it.

    asymmetric: z = min, s = (max - min) / L, q = clip(round((x - z) / s), 0, L), x' = q s + z, L = 2^b - 1 (Eq. 10-12).
    symmetric:  s = max|x| / L, q = clip(round(|x| / s), 0, L), x' = sign(x) q s (Eq. 13): L = 2^b - 1 with signs in
                extra words, or 2^(b-1) - 1 with codes sign(x) q + L.
    hybrid:     per group the mode with the lower squared error; a negative scale marks asymmetric groups.

    Codes are computed with the rounded scales and zero-points. Every step is one IEEE operation in float32, and squared
    errors are added in pairs of neighbours: the same bits on every device.

    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch". tile: replaces the
    tuned one: rows, columns, warps. ValueError for layouts that are `unsupported`.
    """
    if x.dim() != 4 or x.shape[3] != layout.dim or x.shape[2] % layout.block_tokens:
        raise ValueError(f"numbers of shape {tuple(x.shape)} are no whole groups of {layout}")
    if not uses_triton(x, backend):
        return quantize_pack_reference(x, layout)
    if why := unsupported(layout):
        raise ValueError(why)
    return run_kernel(x, layout, tile)
