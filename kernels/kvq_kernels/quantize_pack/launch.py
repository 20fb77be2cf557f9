"""From tensors to a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels import tuning
from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.quantize_pack.kernel import quantize_kernel
from kvq_kernels.quantize_pack.layout import BITS_OF, Layout

OPERATION = "quantize_pack"
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
MOST_TOKENS = 256


def unsupported(layout: Layout) -> str | None:
    """Why the kernel does not pack so; None: it does."""
    group = layout.group
    if group & (group - 1) or group < 2:
        return f"group={group} is no power of two"
    if layout.axis == "channel" and group > MOST_TOKENS:
        return f"groups of {group} tokens do not fit in one program (at most {MOST_TOKENS})"
    if layout.scale_dtype.itemsize != 2:
        return f"scales are of 16 bits, not {layout.scale_dtype}"
    return None


def shape_class(layout: Layout) -> str:
    """For the table of configurations: "channel/group32"."""
    return f"{layout.axis}/group{layout.group}"


def outputs(x: Tensor, layout: Layout) -> Uniform:
    """Tensors to be written; of those that there are not, None."""
    rows, heads, tokens, _ = x.shape
    size = layout.sides(rows, heads, tokens)
    codes = x.new_empty(rows, heads, tokens, sum(layout.words), dtype=torch.int32)
    scale = x.new_empty(size, dtype=layout.scale_dtype)
    zero = x.new_empty(size, dtype=layout.zero_dtype) if layout.has_zero else None
    word = x.new_empty(size, dtype=BITS_OF[layout.group // 8]) if layout.has_words else None
    hybrid = layout.mode == "hybrid"
    return Uniform(codes, scale, layout.bits, layout.axis, layout.group, zero, layout.level, word, hybrid)


def constants(layout: Layout, tile: dict[str, int]) -> dict:
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


def arguments(x: Tensor, packed: Uniform) -> tuple:
    def integers(tensor: Tensor | None) -> Tensor:
        # What there is not is never read or written; a pointer that is None could not be moved.
        return packed.codes if tensor is None else tensor.view(BITS_OF[tensor.element_size()])

    sides = (integers(side) for side in (packed.scale, packed.zero, packed.sign))
    return x, packed.codes, *sides, x.stride()[:3], x.shape[2]


def run_kernel(x: Tensor, layout: Layout, tile: dict[str, int] | None) -> Uniform:
    """`quantize_pack` by the kernel."""
    tile = tile or tuning.configuration(OPERATION, shape_class(layout), x.device)
    x = x if x.stride(3) == 1 else x.contiguous()
    packed, fixed = outputs(x, layout), constants(layout, tile)
    rows, heads, tokens, _ = x.shape
    if packed.codes.numel():
        grid = (triton.cdiv(tokens, fixed["R"]), heads, rows)
        # A product and a sum fused into one operation would be rounded once, not twice as everywhere else.
        quantize_kernel[grid](*arguments(x, packed), **fixed, num_warps=tile["warps"], enable_fp_fusion=False)
    return packed
