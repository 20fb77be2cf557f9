"""Ahead-of-time cases of SQuat's quantization: Llama-3.1-8B's keys, the paper's groups, blocks and ranks."""

from __future__ import annotations

import torch

from kvq_kernels.aot_cases import Launch
from kvq_kernels.squat_quantize.kernel import squat_kernel
from kvq_kernels.squat_quantize.launch import launch

ROWS, HEADS, TOKENS, DIM, RANK, BLOCK = 1, 8, 4096, 128, 5, 64


def launches(gpu: str) -> dict[str, Launch]:
    """Groups of 32 tokens, and of 64."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys = empty(ROWS, HEADS, TOKENS, DIM, dtype=torch.float16)
    subspace = empty(ROWS + 1, HEADS, RANK, DIM, dtype=torch.float32)
    move = empty(ROWS + 1, HEADS, DIM // BLOCK - 1, RANK, DIM, dtype=torch.float64)
    cases = {}
    for bits, group in ((2, 32), (3, 32), (4, 32), (2, 64)):
        _, given, fixed, options = launch(keys, subspace, move, bits, group, BLOCK, torch.float16, gpu)
        cases[f"squat-{bits}bit-g{group}"] = Launch(squat_kernel, given, fixed, options)
    return cases
