"""Quantization of SQuat's keys (https://arxiv.org/abs/2503.24358, Algorithm 1), and packing, in one launch.

Channels are quantized per channel in groups of tokens, a block of channels at a time; each block's error d is moved to
the channels after it (Eq. 6, with B_t H_t in the form whose largest matrix has the rank r of the subspace Q):

    k_after -= (d Q_block^T) gain Q_after,  gain = lambda (1 + lambda Q_after Q_after^T)^-1

`kernel.py` is the kernel, `launch.py` has its arguments, `reference.py` the same in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.squat_quantize.launch import run_kernel
from kvq_kernels.squat_quantize.reference import squat_quantize_reference

__all__ = ["squat_quantize"]


def squat_quantize(
    keys: Tensor,
    subspace: Tensor,
    gain: Tensor,
    *,
    bits: int,
    group: int,
    block: int,
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero) of quantized keys.

    keys:     `[B, H, T, D]`, any floating type, T a multiple of `group`.
    subspace: Q, float32 `[B or 1, H, r, D]`. gain: float32 `[B or 1, H, ceil(D / block) - 1, r, r]`.
    bits:     1, 2, 3, 4 or 8. group: tokens that share a scale. block: channels quantized at a time, below D.
    dtype:    of scales and zero-points, float16 or bfloat16.
    backend:  "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".

    Returns codes int32 `[B, H, T, words]`, planar as `decode_attention.Uniform` says, scale and zero `[B, H, T / group,
    D]`. With gain = 0 they equal plain quantization bit for bit. Errors are moved in float64, so that the order of sums
    matters only where a float32 is within 1e-16 of a tie. ValueError for shapes that do not fit.
    """
    rows, heads, tokens, dim = keys.shape
    rank, blocks = subspace.shape[2], -(-dim // block)
    if tokens % group or not 0 < block < dim or bits not in (1, 2, 3, 4, 8):
        raise ValueError(f"{tokens} tokens in groups of {group}, {dim} channels in blocks of {block}, {bits} bits")
    states = subspace.shape[0]
    if states not in (1, rows) or subspace.shape != (states, heads, rank, dim):
        raise ValueError(f"subspace of shape {tuple(subspace.shape)} for keys of shape {tuple(keys.shape)}")
    if gain.shape != (states, heads, blocks - 1, rank, rank):
        raise ValueError(f"gain of shape {tuple(gain.shape)} for {blocks} blocks of a subspace of rank {rank}")
    if not uses_triton(keys, backend):
        return squat_quantize_reference(keys, subspace, gain, bits, group, block, dtype)
    return run_kernel(keys, subspace, gain, bits, group, block, dtype)
