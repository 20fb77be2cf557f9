"""SQuat's quantization of keys (Algorithm 1) and packing in plain PyTorch. Tests compare the kernel with it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.quantize_pack.layout import Layout
from kvq_kernels.quantize_pack.reference import divide, pack, to_side


def squat_quantize_reference(
    keys: Tensor, subspace: Tensor, gain: Tensor, bits: int, group: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero) of `keys` `[B, H, T, D]`; see `squat_quantize`. Errors are moved in float64."""
    dim, after, codes, scales, zeros = keys.shape[3], keys.float(), [], [], []
    for index, start in enumerate(range(0, dim, block)):
        cut = min(start + block, dim)
        block_keys, after = after[..., : cut - start], after[..., cut - start :]
        groups = block_keys.unflatten(2, (-1, group))
        low, high = groups.amin(dim=3, keepdim=True), groups.amax(dim=3, keepdim=True)
        zero, scale = to_side(low + 0.0, dtype), to_side(divide(high - low, 2**bits - 1), dtype)
        step = scale.float().masked_fill(scale == 0, torch.inf)
        q = ((groups - zero.float()) / step).round().clamp(0, 2**bits - 1)
        error = (q * scale.float() + zero.float() - groups).flatten(2, 3).double()
        codes.append(q.flatten(2, 3).int())
        scales.append(scale.squeeze(3))
        zeros.append(zero.squeeze(3))
        if cut < dim:
            moved = error @ subspace[..., start:cut].mT.double() @ gain[:, :, index].double()
            after = after - (moved @ subspace[..., cut:].double()).float()
    layout = Layout(bits=bits, axis="channel", group=group, dim=dim, scale_dtype=dtype, zero_dtype=dtype)
    return pack(torch.cat(codes, dim=3), layout), torch.cat(scales, dim=3), torch.cat(zeros, dim=3)
