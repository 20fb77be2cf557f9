"""From tensors to a launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from kvq_kernels import tuning
from kvq_kernels.decode_attention.configs import choose_splits
from kvq_kernels.decode_attention.launch import pointers, processors, product_type
from kvq_kernels.decode_attention.parts import Side, Uniform
from kvq_kernels.decode_attention.spec import SideSpec
from kvq_kernels.decode_attention.uniform import folds
from kvq_kernels.quantized_matvec.kernel import outputs_kernel, scores_kernel, sum_kernel

OPERATION = "quantized_matvec"
#: Numbers that one program of `sum_kernel` adds.
SUMMED = 256


def shape_class(packed: Uniform, side: str) -> str:
    """For the table of configurations: "keys/inner/2bit"."""
    inner = packed.axis == ("token" if side == "keys" else "channel")
    return f"{side}/{'inner' if inner else 'outer'}/{packed.bits}bit"


def head_dim(packed: Uniform) -> int:
    return packed.scale.shape[3] * (packed.group if packed.axis == "token" else 1)


def constants(vectors: torch.dtype, packed: Uniform, side: str, group: int, tile: dict[str, int]) -> dict:
    """The compile-time arguments of both kernels."""
    dim = head_dim(packed)
    tokens = tile["tokens"]
    if packed.axis == "channel" and math.gcd(packed.group, tokens) >= 16:
        tokens = math.gcd(packed.group, tokens)
    held = Side(packed, packed.codes)
    spec = SideSpec.of(held, dim)
    fold = folds(spec, "none", tokens, side == "keys")
    return {
        "S": spec,
        "GROUP": group,
        "M": max(triton.next_power_of_2(group), tile["queries"]),
        "N": tokens,
        "E": max(16, min(tile["columns"], triton.next_power_of_2(dim) // 2)),
        "FOLD": fold,
        "REST": int(fold and packed.codes.shape[2] % tokens > 0),
        "T": product_type(held, vectors),
        "PRECISION": "ieee",
        "STAGES": tile["stages"],
    }


def arguments(vectors: Tensor, out: Tensor, packed: Uniform) -> tuple:
    """The other arguments of both."""
    tensors, strides = pointers(Side(packed, packed.codes))
    return vectors, out, tensors, strides, packed.codes.shape[2]


def plan_runs(packed: Uniform, fixed: dict, waves: int, device: torch.device) -> int:
    """Programs that share the tokens of one kv head, that of the tokens that fill no tile included."""
    rows, heads, total, _ = packed.codes.shape
    tiles = total // fixed["N"] if fixed["FOLD"] else -(-total // fixed["N"])
    return choose_splits(rows * heads, max(1, tiles), processors(device), waves) + fixed["REST"]


def partial_sums(weights: Tensor, packed: Uniform, tile: dict[str, int] | None = None) -> Tensor:
    """What `quantized_matvec` of values writes between its two launches; keep it to make none per call."""
    tile, fixed = _plan(weights, packed, "values", tile)
    runs = plan_runs(packed, fixed, tile["waves"], weights.device)
    return torch.empty(runs, *weights.shape[:2], head_dim(packed), dtype=torch.float32, device=weights.device)


def _plan(vectors: Tensor, packed: Uniform, side: str, tile: dict[str, int] | None) -> tuple[dict[str, int], dict]:
    tile = tile or tuning.configuration(OPERATION, shape_class(packed, side), vectors.device)
    return tile, constants(vectors.dtype, packed, side, vectors.shape[1] // packed.codes.shape[1], tile)


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
        runs = plan_runs(packed, fixed, tile["waves"], vectors.device)
        scores_kernel[(runs, heads, rows)](*arguments(vectors, out, packed), **fixed, **options)
        return out
    if out is None:
        out = vectors.new_empty(*vectors.shape[:2], head_dim(packed))
    if partial is None:
        partial = partial_sums(vectors, packed, tile)
    runs = partial.shape[0]
    # One run per head needs no second launch.
    target = out if runs == 1 else partial
    outputs_kernel[(runs, heads, rows)](*arguments(vectors, target, packed), **fixed, **options)
    if runs > 1:
        sum_kernel[(triton.cdiv(out.numel(), SUMMED),)](partial, out, runs, out.numel(), N=SUMMED, num_warps=2)
    return out
