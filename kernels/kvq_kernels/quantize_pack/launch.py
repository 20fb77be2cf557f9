"""Launch of quantization and packing: which layouts are supported, output tensors, arguments of the kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels import tuning
from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.quantize_pack.kernel import quantize_kernel
from kvq_kernels.quantize_pack.layout import INTEGERS, Layout

OPERATION = "quantize_pack"
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
#: Tokens of a group per channel, at most: a program reads whole groups.
MAX_GROUP_TOKENS = 256


def unsupported(layout: Layout) -> str | None:
    """Reason why the kernel does not support a layout; None: it does."""
    group = layout.group
    if group & (group - 1) or group < 2:
        return f"group={group} is no power of two"
    if layout.axis == "channel" and group > MAX_GROUP_TOKENS:
        return f"groups of {group} tokens do not fit in one program (at most {MAX_GROUP_TOKENS})"
    if layout.scale_dtype.itemsize != 2:
        return f"scales are of 16 bits, not {layout.scale_dtype}"
    return None


def shape_class(layout: Layout) -> str:
    """Key of the tuning table, as "channel/group32"."""
    return f"{layout.axis}/group{layout.group}"


def outputs(x: Tensor, layout: Layout) -> Uniform:
    """Empty output tensors for `x` `[B, H, T, D]`."""
    rows, heads, tokens, _ = x.shape
    size = layout.scale_shape(rows, heads, tokens)
    codes = x.new_empty(rows, heads, tokens, sum(layout.words), dtype=torch.int32)
    scale = x.new_empty(size, dtype=layout.scale_dtype)
    zero = x.new_empty(size, dtype=layout.zero_dtype) if layout.has_zero else None
    word = x.new_empty(size, dtype=INTEGERS[layout.group // 8]) if layout.has_words else None
    hybrid = layout.mode == "hybrid"
    return Uniform(codes, scale, layout.bits, layout.axis, layout.group, zero, layout.level, word, hybrid)


def constants(layout: Layout, tile: dict[str, int]) -> dict[str, Any]:
    """Compile-time arguments of `quantize_kernel`."""
    return {
        "D": layout.dim,
        "G": layout.group,
        "BITS": layout.bits,
        "CHANNEL": layout.axis == "channel",
        "SIGN": "none" if layout.mode == "asymmetric" else layout.sign,
        "HYBRID": layout.mode == "hybrid",
        "SCALE": TYPES[layout.scale_dtype],
        "ZERO": TYPES[layout.zero_dtype],
        "FUSED": not knobs.runtime.interpret,
        "R": layout.group if layout.axis == "channel" else tile["rows"],
        "C": tile["columns"],
    }


def arguments(x: Tensor, packed: Uniform) -> tuple[Any, ...]:
    """Run-time arguments of `quantize_kernel`."""

    def integers(tensor: Tensor | None) -> Tensor:
        # Missing tensors are never read or written; a pointer that is None cannot be advanced.
        return packed.codes if tensor is None else tensor.view(INTEGERS[tensor.element_size()])

    per_group = (integers(tensor) for tensor in (packed.scale, packed.zero, packed.sign))
    return x, packed.codes, *per_group, x.stride()[:3], x.shape[2]


@on_its_device
def run_kernel(x: Tensor, layout: Layout, tile: dict[str, int] | None) -> Uniform:
    """`quantize_pack` by the kernel."""
    tile = tile or tuning.configuration(OPERATION, shape_class(layout), x.device)
    x = x if x.stride(3) == 1 else x.contiguous()
    packed, fixed = outputs(x, layout), constants(layout, tile)
    rows, heads, tokens, _ = x.shape
    if packed.codes.numel():
        grid = (triton.cdiv(tokens, fixed["R"]), heads, rows)
        # Without fused multiply-add: the reference rounds products before it adds them.
        quantize_kernel[grid](*arguments(x, packed), **fixed, num_warps=tile["warps"], enable_fp_fusion=False)
    return packed
