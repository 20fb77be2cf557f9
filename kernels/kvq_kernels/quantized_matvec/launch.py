"""Launches of the quantized matrix-vector products: arguments of the kernels, number of programs, partial sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from kvq_kernels import tuning
from kvq_kernels.decode_attention import by_element
from kvq_kernels.decode_attention.arguments import pointers, side_spec
from kvq_kernels.decode_attention.configs import choose_splits
from kvq_kernels.decode_attention.launch import product_type, sm_count, tile_loops
from kvq_kernels.decode_attention.parts import Side, Uniform
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.quantized_matvec.kernel import outputs_kernel, scores_kernel, sum_kernel

OPERATION = "quantized_matvec"
#: Output elements of a program of `sum_kernel`.
SUM_ELEMENTS = 256


def shape_class(packed: Uniform, side: str) -> str:
    """Key of the tuning table, as "keys/inner/2bit"."""
    inner = packed.axis == ("token" if side == "keys" else "channel")
    return f"{side}/{'inner' if inner else 'outer'}/{packed.bits}bit"


def head_dim(packed: Uniform) -> int:
    """D, which the codes' words may exceed."""
    return packed.scale.shape[3] * (packed.group if packed.axis == "token" else 1)


def constants(vectors: torch.dtype, packed: Uniform, side: str, group: int, tile: dict[str, int]) -> dict[str, Any]:
    """Compile-time arguments of `scores_kernel` and `outputs_kernel`."""
    dim = head_dim(packed)
    tokens = tile["tokens"]
    if packed.axis == "channel" and math.gcd(packed.group, tokens) >= 16:
        tokens = math.gcd(packed.group, tokens)
    side_of_codes = Side(packed, packed.codes)  # the count is not read
    spec, dtype = side_spec(side_of_codes, dim), product_type(side_of_codes, vectors)
    keys, values = tile_loops(
        spec,
        spec,
        (dtype, dtype),
        STYLE="none",
        WIDTH=0,
        GROUP=group,
        M=max(triton.next_power_of_2(group), tile["queries"]),
        N=tokens,
        E=max(16, min(tile["columns"], triton.next_power_of_2(dim) // 2)),
        PRECISION="ieee",
    )
    loop, by_elements = (keys, by_element.KEYS) if side == "keys" else (values, by_element.VALUES)
    uniform = loop.reader is not by_elements
    return {
        "C": loop,
        "ELEMENTS": replace(loop, reader=by_elements),
        "UNIFORM": uniform,
        "TAIL": int(uniform and packed.codes.shape[2] % tokens > 0),
        "STAGES": tile["stages"],
    }


def arguments(vectors: Tensor, out: Tensor, packed: Uniform) -> tuple[Any, ...]:
    """Run-time arguments of `scores_kernel` and `outputs_kernel`."""
    tensors, strides = pointers(Side(packed, packed.codes))
    return vectors, out, tensors, strides, packed.codes.shape[2]


def plan_programs(packed: Uniform, fixed: dict[str, Any], waves: int, device: torch.device) -> int:
    """Programs that share the tokens of a kv head, the tail's included."""
    rows, heads, total, _ = packed.codes.shape
    tiles = total // fixed["C"].N if fixed["UNIFORM"] else -(-total // fixed["C"].N)
    return choose_splits(rows * heads, max(1, tiles), sm_count(device), waves) + fixed["TAIL"]


def partial_sums(weights: Tensor, packed: Uniform, tile: dict[str, int] | None = None) -> Tensor:
    """Buffer for `partial` of `quantized_matvec` of values, between its two launches; keep it between calls."""
    tile, fixed = _plan(weights, packed, "values", tile)
    programs = plan_programs(packed, fixed, tile["waves"], weights.device)
    return torch.empty(programs, *weights.shape[:2], head_dim(packed), dtype=torch.float32, device=weights.device)


def _plan(
    vectors: Tensor, packed: Uniform, side: str, tile: dict[str, int] | None
) -> tuple[dict[str, int], dict[str, Any]]:
    """(tile, compile-time arguments)."""
    tile = tile or tuning.configuration(OPERATION, shape_class(packed, side), vectors.device)
    return tile, constants(vectors.dtype, packed, side, vectors.shape[1] // packed.codes.shape[1], tile)


@on_its_device
def run_kernels(
    vectors: Tensor,
    packed: Uniform,
    side: str,
    out: Tensor | None,
    partial: Tensor | None,
    tile: dict[str, int] | None,
) -> Tensor:
    """`quantized_matvec` by the kernels."""
    vectors = vectors.contiguous()
    tile, fixed = _plan(vectors, packed, side, tile)
    rows, heads = packed.codes.shape[:2]
    options = {"num_warps": tile["warps"], "num_stages": max(1, tile["stages"])}
    if side == "keys":
        if out is None:
            out = vectors.new_empty(*vectors.shape[:2], packed.codes.shape[2])
        programs = plan_programs(packed, fixed, tile["waves"], vectors.device)
        scores_kernel[(programs, heads, rows)](*arguments(vectors, out, packed), **fixed, **options)
        return out
    if out is None:
        out = vectors.new_empty(*vectors.shape[:2], head_dim(packed))
    if partial is None:
        partial = partial_sums(vectors, packed, tile)
    programs = partial.shape[0]
    # One program per head needs no second launch.
    target = out if programs == 1 else partial
    outputs_kernel[(programs, heads, rows)](*arguments(vectors, target, packed), **fixed, **options)
    if programs > 1:
        sum_kernel[(triton.cdiv(out.numel(), SUM_ELEMENTS),)](
            partial, out, programs, out.numel(), N=SUM_ELEMENTS, num_warps=2
        )
    return out
