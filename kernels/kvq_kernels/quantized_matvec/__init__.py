"""Quantized matrix-vector products: scores q K^T and outputs p V, a kernel each (InnerQ, Eq. 3 and 5).

Groups along the dimension that is summed over are *inner*: `axis="token"` of keys, `axis="channel"` of values; the
others are *outer*. `decode_attention` fuses both products with the softmax; these reproduce InnerQ's Tables 3 and 4.

`kernel.py` has the kernels, which use `decode_attention`'s uniform path, `launch.py` their arguments, `reference.py`
the same in PyTorch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.quantized_matvec.launch import partial_sums, run_kernels
from kvq_kernels.quantized_matvec.reference import quantized_matvec_reference

__all__ = ["Uniform", "partial_sums", "quantized_matvec"]


def quantized_matvec(
    vectors: Tensor,
    packed: Uniform,
    side: Literal["keys", "values"],
    *,
    out: Tensor | None = None,
    partial: Tensor | None = None,
    backend: Backend = "auto",
    tile: dict[str, int] | None = None,
) -> Tensor:
    """S = Q K^T (side "keys", Eq. 3), `[B, Q, D] -> [B, Q, T]`; O = P V ("values", Eq. 5), `[B, Q, T] -> [B, Q, D]`.

    vectors: float16, bfloat16 or float32, contiguous; query heads of a kv head are neighbours. P: in [0, 1].
    packed:  K or V of B rows, H kv heads and T tokens; see `Uniform`.
    out:     of the vectors' type. partial: of `partial_sums`, for "values". Both are allocated if not given.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".
    tile:    replaces the tuned one: tokens, columns, warps, stages, waves, queries.

    ValueError for shapes that do not fit. Products have float16 operands and float32 sums (float32 of float32 vectors):
    |q s| of a channel must be below 65504, |p s| below 255.
    """
    _check(vectors, packed, side)
    if not uses_triton(vectors, backend):
        result = quantized_matvec_reference(vectors, packed, side, vectors.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(vectors, packed, side, out, partial, tile)


def _check(vectors: Tensor, packed: Uniform, side: str) -> None:
    """ValueError for shapes that do not fit."""
    rows, heads, width = vectors.shape
    if side not in ("keys", "values"):
        raise ValueError(f"side={side!r}: use keys or values")
    packed_rows, kv_heads, tokens, _ = packed.codes.shape
    if rows != packed_rows or heads % kv_heads:
        raise ValueError(f"{rows} rows of {heads} query heads over {packed_rows} rows of {kv_heads} kv heads")
    dim = packed.scale.shape[3] * (packed.group if packed.axis == "token" else 1)
    expected = dim if side == "keys" else tokens
    if width != expected:
        raise ValueError(f"vectors of {width} numbers for {side} of {tokens} tokens and head_dim={dim}")
