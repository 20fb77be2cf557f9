"""Functions for kernels that formats share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs


@triton.constexpr_function
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return knobs.runtime.interpret


@triton.jit
def nothing(pointers, C: tl.constexpr):
    """No table."""
    return ()


@triton.jit
def no_prefetch(v, tile, C: tl.constexpr):
    """No loads ahead."""
    return ()


@triton.jit
def moved(pointer, offset):
    """The pointer `offset` bytes further."""
    return (pointer.to(tl.pointer_type(tl.uint8), bitcast=True) + offset).to(pointer.dtype, bitcast=True)
