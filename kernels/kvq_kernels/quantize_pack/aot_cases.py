"""What is compiled and read without a GPU: every mode, both axes."""

from __future__ import annotations

import torch

from kvq_kernels import tuning
from kvq_kernels.aot_cases import Launch
from kvq_kernels.quantize_pack.kernel import quantize_kernel
from kvq_kernels.quantize_pack.launch import OPERATION, arguments, constants, outputs, shape_class
from kvq_kernels.quantize_pack.layout import Layout

ROWS, HEADS, TOKENS, DIM = 8, 8, 4096, 128


def layouts() -> dict[str, Layout]:
    found = {}
    for axis in ("token", "channel"):
        chosen = [(bits, group, "asymmetric", "inside") for bits, group in ((2, 32), (3, 32), (4, 128))]
        chosen += [(2, 32, *mode) for mode in (("symmetric", "extra"), ("hybrid", "extra"), ("hybrid", "inside"))]
        for bits, group, mode, sign in chosen:
            apart = mode != "asymmetric" and sign == "extra"
            name = f"{axis}-{bits}bit-g{group}-{mode}" + (f"-{sign}" if mode != "asymmetric" else "")
            zero = torch.float32 if apart else torch.float16
            found[name] = Layout(bits, axis, group, DIM, mode, sign, zero_dtype=zero)
    return found


def launches(gpu: str) -> dict[str, Launch]:
    found = {}
    for name, layout in layouts().items():
        tile = tuning.configuration(OPERATION, shape_class(layout), gpu)
        x = torch.empty(ROWS, HEADS, TOKENS, DIM, dtype=torch.float16, device="meta")
        packed, fixed = outputs(x, layout), constants(layout, tile) | {"FUSED": True}
        parts = [part for part in (packed.codes, packed.scale, packed.zero, packed.sign) if part is not None]
        bits = 16 + 8 * sum(part.numel() * part.element_size() for part in parts) / x.numel()
        given = arguments(x, packed)
        options = {"num_warps": tile["warps"], "enable_fp_fusion": False}
        found[name] = Launch(quantize_kernel, given, fixed, options, numbers=fixed["R"] * DIM, bits=bits)
    return found
