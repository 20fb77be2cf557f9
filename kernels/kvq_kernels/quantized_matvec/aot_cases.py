"""Ahead-of-time cases of the quantized matrix-vector products: inner and outer groups, in every mode."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvq_kernels import tuning
from kvq_kernels.aot_cases import Launch, stored_bytes
from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.planar import high_words, low_words
from kvq_kernels.quantized_matvec.kernel import outputs_kernel, scores_kernel, sum_kernel
from kvq_kernels.quantized_matvec.launch import OPERATION, SUM_ELEMENTS, arguments, constants, shape_class

ROWS, HEADS, GROUP, DIM, TOKENS, PACKED_GROUP = 8, 8, 4, 128, 4096, 32
MODES = ("asymmetric", "symmetric", "inside", "hybrid")


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def uniform(bits: int, axis: Literal["channel", "token"], mode: str) -> Uniform:
    """Uniform codes without memory. mode: one of `MODES`; "symmetric" has separate sign bits, "inside" one of
    `bits`."""
    group = PACKED_GROUP
    size = (ROWS, HEADS, TOKENS // group, DIM) if axis == "channel" else (ROWS, HEADS, TOKENS, DIM // group)
    words = low_words(bits, DIM) + high_words(bits, DIM)
    zero = _empty(*size) if mode == "asymmetric" else None
    sign = _empty(*size, dtype=torch.int32) if mode in ("symmetric", "hybrid") else None
    level = 2 ** (bits - 1) - 1 if mode == "inside" else 0
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    return Uniform(codes, _empty(*size), bits, axis, group, zero, level, sign, mode == "hybrid")


def cases() -> dict[str, tuple[str, Uniform]]:
    """name -> ("keys" or "values", packed)."""
    sides: dict[str, dict[str, Literal["channel", "token"]]] = {
        "keys": {"inner": "token", "outer": "channel"},
        "values": {"inner": "channel", "outer": "token"},
    }
    return {
        f"{side}-{grouping}-{bits}bit-{mode}": (side, uniform(bits, axis, mode))
        for side, axes in sides.items()
        for grouping, axis in axes.items()
        for bits, mode in [(2, "asymmetric"), (3, "asymmetric"), (4, "asymmetric"), *((2, mode) for mode in MODES[1:])]
    }


def kind(packed: Uniform) -> str:
    """Kind of `Launch`: "uniform", whose instructions per number are limited, or "none" for 3-bit codes and signs,
    which take as many shifts again."""
    return "none" if packed.bits == 3 or packed.sign is not None else "uniform"


def launches(gpu: str) -> dict[str, Launch]:
    """The product of every case, and the sum of its partial results."""
    named = {}
    for name, (side, packed) in cases().items():
        tile = tuning.configuration(OPERATION, shape_class(packed, side), gpu)
        fixed = constants(torch.float16, packed, side, GROUP, tile)
        queries, scores = (_empty(ROWS, HEADS * GROUP, width) for width in (DIM, TOKENS))
        partial = _empty(8, ROWS, HEADS * GROUP, DIM, dtype=torch.float32)
        kernel, vectors, out = (scores_kernel, queries, scores) if side == "keys" else (outputs_kernel, scores, partial)
        bits = 8 * stored_bytes(packed.codes, packed.scale, packed.zero, packed.sign) / (ROWS * HEADS * TOKENS * DIM)
        given = arguments(vectors, out, packed)
        options = {"num_warps": tile["warps"], "num_stages": max(1, tile["stages"])}
        named[name] = Launch(kernel, given, fixed, options, kind(packed), fixed["C"].N * DIM, bits)
    partial = _empty(8, ROWS, HEADS * GROUP, DIM, dtype=torch.float32)
    count = partial[0].numel()
    named["sum"] = Launch(sum_kernel, (partial, _empty(count), 8, count), {"N": SUM_ELEMENTS}, {"num_warps": 2})
    return named
