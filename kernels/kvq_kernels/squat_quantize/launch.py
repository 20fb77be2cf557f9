"""Launch of SQuat's quantization: output tensors and arguments of the kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kvq_kernels.launch_device import on_its_device
from kvq_kernels.planar import high_words, low_words
from kvq_kernels.squat_quantize.kernel import squat_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "squat_quantize"
#: Numbers of a group of all channels beyond which a program needs more warps.
LARGE_GROUP = 8192


def shape_class(group: int, dim: int) -> str:
    """Key of the tuning table."""
    return "large" if group * dim > LARGE_GROUP else "small"


def movement(subspace: Tensor, gain: Tensor, block: int) -> Tensor:
    """gain Q_after of each block but the last, 0 for channels up to it: float64 `[B or 1, H, blocks - 1, r, D]`."""
    dim = subspace.shape[3]
    ends = torch.arange(block, dim, block, device=subspace.device)
    after = torch.arange(dim, device=subspace.device) >= ends[:, None]
    return gain.double() @ (subspace.double().unsqueeze(2) * after[:, None])


def launch(
    keys: Tensor, subspace: Tensor, move: Tensor, bits: int, group: int, block: int, dtype: torch.dtype, gpu: str
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(grid, arguments, constants, options) of `squat_kernel`; arguments 4 to 6 are its outputs."""
    rows, heads, tokens, dim = keys.shape
    words = low_words(bits, dim) + high_words(bits, dim)
    codes = keys.new_empty(rows, heads, tokens, words, dtype=torch.int32)
    scale, zero = (keys.new_empty(rows, heads, tokens // group, dim, dtype=dtype) for _ in range(2))
    given = (
        keys,
        keys.stride()[:3],
        subspace,
        move,
        codes,
        scale,
        zero,
        subspace.shape[2],
        int(subspace.shape[0] == 1),
    )
    fixed = {"BITS": bits, "GROUP": group, "N": triton.next_power_of_2(group), "D": dim, "BLOCK": block}
    config = configuration(OPERATION, shape_class(group, dim), gpu)
    # Without fused multiply-add: PyTorch rounds q s before it adds z.
    options = {"num_warps": config["warps"], "num_stages": config["stages"], "enable_fp_fusion": False}
    return (tokens // group, heads, rows), given, fixed, options


@on_its_device
def run_kernel(
    keys: Tensor, subspace: Tensor, gain: Tensor, bits: int, group: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`squat_quantize` by the kernel."""
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    move = movement(subspace, gain, block)
    grid, given, fixed, options = launch(
        keys, subspace.contiguous(), move, bits, group, block, dtype, family(keys.device)
    )
    if keys.shape[2]:
        squat_kernel[grid](*given, **fixed, **options)
    return given[4:7]
