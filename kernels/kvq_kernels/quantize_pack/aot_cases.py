"""Ahead-of-time cases of quantization and packing: every mode, both groupings."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from kvq_kernels import tuning
from kvq_kernels.aot_cases import Launch, stored_bytes
from kvq_kernels.quantize_pack.kernel import quantize_kernel
from kvq_kernels.quantize_pack.launch import OPERATION, arguments, constants, outputs, shape_class
from kvq_kernels.quantize_pack.layout import Layout

ROWS, HEADS, TOKENS, DIM = 8, 8, 4096, 128


def layouts() -> dict[str, Layout]:
    """name -> layout."""
    axes: tuple[Literal["token"], Literal["channel"]] = ("token", "channel")
    cases = {}
    for axis in axes:
        for bits, group in ((2, 32), (3, 32), (4, 128)):
            cases[f"{axis}-{bits}bit-g{group}-asymmetric"] = Layout(bits, axis, group, DIM, sign="inside")
        wide = Layout(2, axis, 32, DIM, zero_dtype=torch.float32)  # a zero-point replaces a word of 32 sign bits
        cases[f"{axis}-2bit-g32-symmetric-extra"] = replace(wide, mode="symmetric")
        cases[f"{axis}-2bit-g32-hybrid-extra"] = replace(wide, mode="hybrid")
    return cases


def launches(gpu: str) -> dict[str, Launch]:
    """One launch per layout."""
    cases = {}
    for name, layout in layouts().items():
        tile = tuning.configuration(OPERATION, shape_class(layout), gpu)
        x = torch.empty(ROWS, HEADS, TOKENS, DIM, dtype=torch.float16, device="meta")
        packed, fixed = outputs(x, layout), constants(layout, tile) | {"FUSED": True}
        bits = 16 + 8 * stored_bytes(packed.codes, packed.scale, packed.zero, packed.sign) / x.numel()
        options = {"num_warps": tile["warps"], "enable_fp_fusion": False}
        given = arguments(x, packed)
        cases[name] = Launch(quantize_kernel, given, fixed, options, numbers=fixed["R"] * DIM, bits=bits)
    return cases
