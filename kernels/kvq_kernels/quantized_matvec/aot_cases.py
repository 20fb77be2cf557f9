"""What is compiled and read without a GPU: InnerQ's products, inner and outer, in every mode."""

from __future__ import annotations

import torch

from kvq_kernels import tuning
from kvq_kernels.aot_cases import Launch
from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.planar import high_words, low_words
from kvq_kernels.quantized_matvec.kernel import outputs_kernel, scores_kernel, sum_kernel
from kvq_kernels.quantized_matvec.launch import OPERATION, SUMMED, arguments, constants, shape_class

ROWS, HEADS, GROUP, DIM, TOKENS, QUANTIZED_TOGETHER = 8, 8, 4, 128, 4096, 32
MODES = ("asymmetric", "symmetric", "inside", "hybrid", "hybrid-inside")


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def uniform(bits: int, axis: str, mode: str) -> Uniform:
    """mode: one of `MODES`; "symmetric" has its sign bits apart, "inside" among the `bits`."""
    group = QUANTIZED_TOGETHER
    size = (ROWS, HEADS, TOKENS // group, DIM) if axis == "channel" else (ROWS, HEADS, TOKENS, DIM // group)
    words = low_words(bits, DIM) + high_words(bits, DIM)
    zero = _empty(*size) if mode in ("asymmetric", "hybrid-inside") else None
    sign = _empty(*size, dtype=torch.int32) if mode in ("symmetric", "hybrid") else None
    level = 2 ** (bits - 1) - 1 if mode.endswith("inside") else 0
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    return Uniform(codes, _empty(*size), bits, axis, group, zero, level, sign, mode.startswith("hybrid"))


def cases() -> dict[str, tuple[str, Uniform]]:
    """name -> side, packed."""
    found = {}
    for side, inner, outer in (("keys", "token", "channel"), ("values", "channel", "token")):
        for place, axis in (("inner", inner), ("outer", outer)):
            chosen = [(bits, "asymmetric") for bits in (2, 3, 4)] + [(2, mode) for mode in MODES[1:]]
            for bits, mode in chosen:
                found[f"{side}-{place}-{bits}bit-{mode}"] = (side, uniform(bits, axis, mode))
    return found


def kind(packed: Uniform) -> str:
    """Codes of one part without signs or modes of their own keep to the limit of uniform codes. The others do not: the
    shifts that put a sign or a third bit in its place are as many again. They are counted without a limit."""
    return "none" if packed.bits == 3 or packed.sign is not None or packed.hybrid else "uniform"


def launches(gpu: str) -> dict[str, Launch]:
    found = {}
    for name, (side, packed) in cases().items():
        tile = tuning.configuration(OPERATION, shape_class(packed, side), gpu)
        fixed = constants(torch.float16, packed, side, GROUP, tile)
        given = [_empty(ROWS, HEADS * GROUP, width) for width in (DIM, TOKENS)]
        vectors, out = given if side == "keys" else (given[1], _empty(8, ROWS, HEADS * GROUP, DIM, dtype=torch.float32))
        kernel = scores_kernel if side == "keys" else outputs_kernel
        parts = [part for part in (packed.codes, packed.scale, packed.zero, packed.sign) if part is not None]
        bits = 8 * sum(part.numel() * part.element_size() for part in parts) / (ROWS * HEADS * TOKENS * DIM)
        asked = arguments(vectors, out, packed)
        options = {"num_warps": tile["warps"], "num_stages": max(1, tile["stages"])}
        found[name] = Launch(kernel, asked, fixed, options, kind(packed), fixed["N"] * DIM, bits)
    partial = _empty(8, ROWS, HEADS * GROUP, DIM, dtype=torch.float32)
    count = partial[0].numel()
    found["sum"] = Launch(sum_kernel, (partial, _empty(count), 8, count), {"N": SUMMED}, {"num_warps": 2})
    return found
