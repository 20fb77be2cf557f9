"""Attention over transform codes in plain PyTorch: look up, transform, softmax(q K^T) V. Tests compare with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

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
    if side.codes is None:
        rows, (heads, dim) = side.exact.count.shape[0], side.transform.mean.shape
        return replace(side.exact, packed=Dense(side.transform.mean.new_empty(rows, heads, 0, dim, dtype=dtype)))
    return replace(side.exact, packed=Dense(restore(side, dtype)))


def restore(side: Transformed, dtype: torch.dtype) -> Tensor:
    """Packed tokens `[B, H, T, D]` in `dtype`."""
    assert side.codes is not None
    transform, codes = side.transform, side.codes[:, 0].long()
    dim, steps = transform.mean.shape[1], transform.steps.steps.tolist()
    parts = []
    for group, (first, end, offset, kept) in enumerate(transform.steps.groups.tolist()):
        z = codes.new_zeros(*codes.shape[:2], kept, dtype=dtype)
        for _, code, many, size, row, component in steps[first:end]:
            for i in range(many):
                table = transform.centroids[row + i * size].to(dtype)
                z[..., component + i * size] = table[codes[..., code + i]]
        own = slice(group * transform.group_heads, (group + 1) * transform.group_heads)
        channels = transform.group_heads * dim
        synthesis = transform.synthesis[offset : offset + channels * kept].view(channels, kept).to(dtype)
        x = (z @ synthesis.T).unflatten(2, (transform.group_heads, dim)) + transform.mean[own].to(dtype)
        parts.append(x.transpose(1, 2))
    return torch.cat(parts, dim=1)
