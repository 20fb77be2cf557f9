"""Quantization and packing in plain PyTorch, one equation at a time. Tests compare the kernel with it, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.quantize_pack.layout import INTEGERS, SPLIT, Layout


def quantize_pack_reference(x: Tensor, layout: Layout) -> Uniform:
    """Quantized and packed `x` `[B, H, T, D]`; see `quantize_pack`."""
    dim = 3 if layout.axis == "channel" else 4
    groups = x.float().unflatten(dim - 1, (-1, layout.group))  # a group's numbers are along `dim`
    zero, sign = None, None
    if layout.mode == "asymmetric":
        codes, scale, zero = _asymmetric(groups, layout, dim)
    else:
        codes, scale, sign = _symmetric(groups, layout, dim)
    if layout.mode == "hybrid" and sign is not None:
        q, s, zero = _asymmetric(groups, layout, dim)
        error = codes * scale.float() - groups.abs()
        better = _sum_of_squares(q * s.float() + zero.float() - groups, dim) < _sum_of_squares(error, dim)
        codes, scale = torch.where(better, q, codes), torch.where(better, -s, scale)
        sign = torch.where(better, zero.view(sign.dtype), sign)
    return Uniform(
        pack(codes.to(torch.int32).view(x.shape), layout),
        scale.squeeze(dim),
        layout.bits,
        layout.axis,
        layout.group,
        zero.squeeze(dim) if zero is not None and layout.has_zero else None,
        layout.level,
        None if sign is None else sign.squeeze(dim),
        layout.mode == "hybrid",
    )


def _asymmetric(groups: Tensor, layout: Layout, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes as float32, scale, zero-point) by Eq. 10-12."""
    low, high = (extreme + 0.0 for extreme in groups.aminmax(dim=dim, keepdim=True))  # minus zero becomes zero
    levels = 2**layout.bits - 1
    scale, zero = to_side(divide(high - low, levels), layout.scale_dtype), to_side(low, layout.zero_dtype)
    return _quantized(groups - zero.float(), scale, 0, levels), scale, zero


def _symmetric(groups: Tensor, layout: Layout, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes as float32, scale, words of sign bits or None) by Eq. 13."""
    scale = to_side(divide(groups.abs().amax(dim=dim, keepdim=True), layout.largest), layout.scale_dtype)
    if layout.sign == "inside":
        return _quantized(groups, scale, -layout.largest, layout.largest) + layout.level, scale, None
    dtype = INTEGERS[layout.group // 8]
    positions = torch.arange(layout.group, dtype=dtype, device=groups.device)
    bits = groups.signbit().to(dtype) << (positions.unsqueeze(1) if layout.axis == "channel" else positions)
    sign = bits.sum(dim=dim, dtype=dtype, keepdim=True)
    return _quantized(groups.abs(), scale, 0, layout.largest), scale, sign


def pack(codes: Tensor, layout: Layout) -> Tensor:
    """Planar words of integers `[..., D]`, see `Uniform.codes`."""
    parts, shift = [], 0
    for bits, words in zip(SPLIT[layout.bits], layout.words, strict=True):
        packed = torch.zeros(*codes.shape[:-1], words, dtype=torch.int32, device=codes.device)
        for plane, part in enumerate(((codes >> shift) & (2**bits - 1)).split(words, dim=-1)):
            packed[..., : part.shape[-1]] |= part << (bits * plane)
        parts.append(packed)
        shift += bits
    return torch.cat(parts, dim=-1)


def to_side(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `x` in the dtype of a scale or zero-point, see `kernel.to_bits`."""
    most = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp(-most, most).to(dtype)


def divide(x: Tensor, number: int) -> Tensor:
    """x / number, rounded once on every device: CUDA multiplies by the reciprocal of a Python number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _quantized(distances: Tensor, scale: Tensor, lower: int, upper: int) -> Tensor:
    """clip(round(distance / scale), lower, upper), as float32; 0 where the scale is 0."""
    divisor = torch.where(scale == 0, torch.inf, scale.float())
    return (distances / divisor).round().clamp(lower, upper)


def _sum_of_squares(error: Tensor, dim: int) -> Tensor:
    """Sum of squares along `dim` in the kernel's order: neighbours, then neighbouring sums, ..."""
    squares = error.square()
    while (count := squares.shape[dim]) > 1:
        if count % 2:
            squares = torch.cat([squares, torch.zeros_like(squares.narrow(dim, 0, 1))], dim=dim)
        squares = squares.unflatten(dim, (-1, 2))
        squares = squares.select(dim + 1, 0) + squares.select(dim + 1, 1)
    return squares
