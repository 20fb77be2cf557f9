"""Encoding of tokens as integers of a transform's components, and packing in `fields`, in one launch.

A token x becomes u = A (x - mean), its gain g, and the codes round(u / g + center), clamped to the bits of their
component. `tables.py` has the constants and the outputs, `kernel.py` the kernel, `launch.py` its arguments,
`reference.py` the same in PyTorch. `transform_attention` reads the result.
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.transform_pack.launch import run_kernel, unsupported
from kvq_kernels.transform_pack.reference import transform_pack_reference
from kvq_kernels.transform_pack.tables import GainTables, PackTables

__all__ = ["GainTables", "PackTables", "transform_pack", "unsupported"]


def transform_pack(
    x: Tensor, tables: PackTables, *, backend: Backend = "auto"
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(codes, gains) of finite `x` `[B, G, T, W]` (float16, bfloat16 or float32), T a multiple of `fields.BLOCK`.

    codes: one tensor for each of `fields.parts` of the profile, as that module says. gains: uint8 `[B, G, T]`, n of the
    gain 2^((n - 128) / 16); None where `tables` has none.

    A is integers, and so is x - mean on its grid: products and their sums are below 2^53, and exact in float64 in any
    order. All else is one IEEE operation a number: the same bits on every device.

    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch". ValueError for shapes that do not
    fit, or are `unsupported`.
    """
    groups, width, _ = tables.integers.shape
    if x.dim() != 4 or (x.shape[1], x.shape[3]) != (groups, width) or x.shape[2] % fields.BLOCK:
        raise ValueError(f"tokens of shape {tuple(x.shape)} for {groups} groups of {width} channels")
    if not uses_triton(x, backend):
        return transform_pack_reference(x, tables)
    if why := unsupported(width):
        raise ValueError(why)
    return run_kernel(x, tables)
