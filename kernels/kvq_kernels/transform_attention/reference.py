"""Attention over transform codes in plain PyTorch: unpack, transform, softmax(q K^T) V. Tests compare with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.decode_attention.reference import decode_attention_reference
from kvq_kernels.transform_attention.parts import Transformed


def transform_attention_reference(
    query: Tensor,
    keys: Transformed,
    values: Transformed,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """`decode_attention_reference` of keys and values that are transformed back; see there."""
    dense_keys, dense_values = side_of(keys, dtype), side_of(values, dtype)
    return decode_attention_reference(query, dense_keys, dense_values, lengths, scaling, rope, dtype, round_to, window)


def side_of(side: Transformed, dtype: torch.dtype) -> Side:
    """The side with dense numbers for its packed tokens, in `dtype`."""
    return replace(side.exact, packed=Dense(restore(side, dtype).contiguous()))


def restore(side: Transformed, dtype: torch.dtype) -> Tensor:
    """Packed tokens g S (c - center) + mean, `[B, H, T, D]` in `dtype`, computed in it, but at least in float32."""
    wide, transform = torch.promote_types(dtype, torch.float32), side.transform
    exact = side.exact.sinks if side.exact.ring is None else side.exact.ring
    assert exact is not None
    heads, dim = exact.shape[1], exact.shape[3]
    if not side.codes:
        return transform.mean.new_empty(len(exact), heads, 0, dim, dtype=dtype)
    z = unpack(side.codes, transform.widths).to(wide) - transform.center.to(wide)[:, None]
    if side.gain is not None:
        z = z * torch.exp2((side.gain.float() - 128) / 16).half().to(wide)[..., None]
    x = z @ transform.synthesis.to(wide).mT + transform.mean.to(wide)[:, None]  # [B, G, T, W]
    return x.unflatten(3, (-1, dim)).transpose(2, 3).flatten(1, 2).to(dtype)


def unpack(codes: tuple[Tensor, ...], widths: tuple[int, ...]) -> Tensor:
    """Codes `[B, G, T, K]`, int32, of the tensors of all parts, of keys or values."""
    parts, read = fields.parts(fields.rate(widths)), []
    for place, width in zip(fields.places(widths), widths, strict=True):
        words, at = codes[place.part][..., place.word].int(), place.shift + place.offset
        halves = torch.stack([words >> at, words >> (at + parts[place.part].room)], dim=-1) & (2**width - 1)
        if codes[0].shape[3] == fields.KEY_LANES:  # [B, G, T, 4, 2]
            read.append(halves.flatten(3))
        else:  # [B, G, T / 16, 8, 8, 2]
            read.append(halves.transpose(4, 5).flatten(2, 4))
    if not read:
        rows, groups = codes[0].shape[:2]
        tokens = codes[0].shape[2] * (1 if codes[0].shape[3] == fields.KEY_LANES else fields.BLOCK)
        return codes[0].new_empty(rows, groups, tokens, 0, dtype=torch.int32)
    return torch.cat(read, dim=3)
