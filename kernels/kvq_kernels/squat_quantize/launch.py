"""From tensors to a launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kvq_kernels.planar import high_words, low_words
from kvq_kernels.squat_quantize.kernel import squat_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "squat_quantize"
#: Numbers of a group beyond which a program needs more warps.
LARGE = 8192


def key_of(group: int, dim: int) -> str:
    """Shape class in the table of configurations."""
    return "large" if group * dim > LARGE else "small"


def movement(subspace: Tensor, gain: Tensor, block: int) -> Tensor:
    """gain Q_rest of each block but the last, 0 for the channels up to it: float64 `[B or 1, H, blocks - 1, r, D]`."""
    dim = subspace.shape[3]
    first_of_rest = torch.arange(block, dim, block, device=subspace.device)
    rest = torch.arange(dim, device=subspace.device) >= first_of_rest[:, None]
    return gain.double() @ (subspace.double().unsqueeze(2) * rest[:, None])


def launch(
    keys: Tensor, subspace: Tensor, move: Tensor, bits: int, group: int, block: int, dtype: torch.dtype, gpu: str
) -> tuple[tuple, tuple, dict[str, Any], dict[str, Any]]:
    """(grid, arguments, constants, options) of `squat_kernel`; arguments 4 to 6 are what it writes."""
    rows, heads, tokens, dim = keys.shape
    words = low_words(bits, dim) + high_words(bits, dim)
    codes = keys.new_empty(rows, heads, tokens, words, dtype=torch.int32)
    sides = [keys.new_empty(rows, heads, tokens // group, dim, dtype=dtype) for _ in range(2)]
    given = (keys, keys.stride()[:3], subspace, move, codes, *sides, subspace.shape[2], int(subspace.shape[0] == 1))
    fixed = {"BITS": bits, "GROUP": group, "N": triton.next_power_of_2(group), "D": dim, "BLOCK": block}
    own = configuration(OPERATION, key_of(group, dim), gpu)
    # x' = q s + z is rounded twice where PyTorch rounds twice.
    options = {"num_warps": own["warps"], "num_stages": own["stages"], "enable_fp_fusion": False}
    return (tokens // group, heads, rows), given, fixed, options


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
