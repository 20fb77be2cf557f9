"""The same in plain PyTorch, step by step as the equations say."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.quantize_pack.layout import BITS_OF, SPLIT, Layout


def quantize_pack_reference(x: Tensor, layout: Layout) -> Uniform:
    """See `quantize_pack`."""
    dim = 3 if layout.axis == "channel" else 4
    groups = x.float().unflatten(dim - 1, (-1, layout.group))  # the numbers of a group along `dim`
    scale, zero, word = None, None, None
    if layout.mode != "symmetric":
        low, high = (side + 0.0 for side in groups.aminmax(dim=dim, keepdim=True))  # minus zero becomes zero
        most = 2**layout.bits - 1
        scale, zero = divide(high - low, most).to(layout.scale_dtype), low.to(layout.zero_dtype)
        codes = _steps(groups - zero.float(), scale, 0, most)
        restored = codes * scale.float() + zero.float()
    if layout.mode != "asymmetric":
        least = 0 if layout.sign == "extra" else -layout.largest
        own = divide(groups.abs().amax(dim=dim, keepdim=True), layout.largest).to(layout.scale_dtype)
        steps = _steps(groups.abs() if layout.sign == "extra" else groups, own, least, layout.largest)
        if layout.sign == "extra":
            type = BITS_OF[layout.group // 8]
            places = torch.arange(layout.group, dtype=type, device=x.device)
            bits = groups.signbit().to(type) << (places.unsqueeze(1) if layout.axis == "channel" else places)
            word = bits.sum(dim=dim, dtype=type, keepdim=True)
        symmetric = steps + layout.level
        if layout.mode == "symmetric":
            codes, scale = symmetric, own
        else:
            target = groups.abs() if layout.sign == "extra" else groups
            chosen = _error(restored - groups, dim) < _error(steps * own.float() - target, dim)
            codes, scale = torch.where(chosen, codes, symmetric), torch.where(chosen, -scale, own)
            if layout.sign == "extra":
                word = torch.where(chosen, zero.view(word.dtype), word)
    planes = pack(codes.to(torch.int32).view(x.shape), layout)
    scale, zero, word = (None if side is None else side.squeeze(dim) for side in (scale, zero, word))
    return Uniform(
        planes,
        scale,
        layout.bits,
        layout.axis,
        layout.group,
        zero if layout.has_zero else None,
        layout.level,
        word,
        layout.mode == "hybrid",
    )


def pack(codes: Tensor, layout: Layout) -> Tensor:
    """Integers `[..., D]` -> planar words, see `Uniform.codes`."""
    found, taken = [], 0
    for bits, words in zip(SPLIT[layout.bits], layout.words, strict=True):
        own = torch.zeros(*codes.shape[:-1], words, dtype=torch.int32, device=codes.device)
        for plane, part in enumerate(((codes >> taken) & (2**bits - 1)).split(words, dim=-1)):
            own[..., : part.shape[-1]] |= part << (bits * plane)
        found.append(own)
        taken += bits
    return torch.cat(found, dim=-1)


def divide(x: Tensor, number: int) -> Tensor:
    """x / number, rounded once on every device: CUDA multiplies by the reciprocal where the divisor is Python's."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _steps(distances: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Distances in steps of the scale, whole numbers; 0 where the scale is 0."""
    divisor = torch.where(scale == 0, torch.inf, scale.float())
    return (distances / divisor).round().clamp(least, most)


def _error(error: Tensor, dim: int) -> Tensor:
    """Squares added by neighbours, these sums by neighbours, ...: the kernel's order, for the same choice."""
    squares = error.square()
    while (count := squares.shape[dim]) > 1:
        if count % 2:
            squares = torch.cat([squares, torch.zeros_like(squares.narrow(dim, 0, 1))], dim=dim)
        squares = squares.unflatten(dim, (-1, 2))
        squares = squares.select(dim + 1, 0) + squares.select(dim + 1, 1)
    return squares
