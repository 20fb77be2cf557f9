"""Encoding and packing in plain PyTorch. Tests compare the kernel with it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.transform_pack.tables import GainTables, PackTables


def transform_pack_reference(x: Tensor, tables: PackTables) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(codes, gains); see `transform_pack`."""
    grid = _rounded((x.float() - tables.mean.unsqueeze(1)) * tables.to_grid.unsqueeze(1), tables.limit)
    u = ((grid @ tables.integers.double()) * tables.step.unsqueeze(1)).float()
    index = None
    if tables.gain is not None:
        index = _index(u, tables.gain)
        u = u / tables.gain.gains[index.long()].unsqueeze(3)
    codes = (u + tables.center.unsqueeze(1)).round().clamp(0, 255).int().unflatten(3, (-1, fields.FIELD))
    return _pack(torch.minimum(codes, tables.largest.int().unsqueeze(1)), tables), index


def _rounded(x: Tensor, limit: float) -> Tensor:
    return x.round().clamp(-limit, limit).double()


def _index(u: Tensor, gain: GainTables) -> Tensor:
    squares = _rounded(u * gain.scale.unsqueeze(1), gain.limit).square()
    greater = torch.maximum(squares.sum(dim=3) / gain.total, squares[..., : gain.first].amax(dim=3) / gain.largest)
    return torch.bucketize(greater, gain.limits, right=True).to(torch.uint8)


def _pack(codes: Tensor, tables: PackTables) -> tuple[Tensor, ...]:
    """Of codes `[B, G, T, fields, 8]`."""
    if tables.values:  # [B, G, blocks, pairs, 2, fields, lanes]
        halves = codes.unflatten(2, (-1, fields.BLOCK // 2, 2)).movedim(4, -1).transpose(4, 5)
    else:  # [B, G, T, fields, lanes, 2]
        halves = codes.unflatten(4, (fields.KEY_LANES, 2)).transpose(3, 4)
    shifts = torch.stack([tables.shift.int(), tables.high], dim=1)  # [.., lanes, fields, 2]
    bits = (halves.long() << shifts).sum(dim=-1)
    words, first, packed = tables.word.long(), 0, []
    for part, out in zip(tables.parts, tables.outputs(codes.flatten(3))[0], strict=True):
        chosen = words - first == torch.arange(part.words, device=words.device).unsqueeze(1)
        packed.append(out.copy_((bits.unsqueeze(-2) * chosen).sum(dim=-1)))
        first += part.words
    return tuple(packed)
