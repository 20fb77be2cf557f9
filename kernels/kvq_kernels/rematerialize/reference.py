"""Attention over layer inputs in plain PyTorch: unpack, project to keys, absorb values. Tests compare with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import PerHead, Rope
from kvq_kernels.decode_attention.reference import rotate, row_tokens
from kvq_kernels.rematerialize.parts import Latents, Norm


def rematerialize_reference(
    query: Tensor,
    keys: Latents,
    values: Latents,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """out = P X_v W_v + b_v, P = softmax(scaling q K^T), K = R(norm(X_k W_k + b_k)), over each row's first lengths[b]
    tokens, in `dtype`.

    query:    `[B, Q, D]`. lengths: int32 `[B]`. window: number of newest tokens to attend to; None: all.
    round_to: type that X_k, keys before RoPE and P X_v are rounded to, as in a model of that type; None: not rounded.

    Returns `[B, Q, D]` in `dtype`; zeros for rows without tokens.
    """
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    packed_keys, packed_values = _unpacked(keys, dtype), _unpacked(values, dtype)
    dim = query.shape[2]

    def rounded(x: Tensor) -> Tensor:
        return x if round_to is None else x.to(round_to).to(dtype)

    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        seen = slice(0 if window is None else max(0, length - window), None)
        k = _keys(keys, row_tokens(keys.held, packed_keys, row, length), dim, rounded)
        if rope is not None:
            k = rotate(k, rope, 0 if rope.offset is None else int(rope.offset[row]))
        q = query[row].to(dtype).view(k.shape[0], -1, dim)
        p = (q @ k[:, seen].transpose(1, 2) * scaling).softmax(dim=-1)
        p_x = rounded(p @ row_tokens(values.held, packed_values, row, length)[:, seen])
        projected = p_x @ values.weight.to(dtype).unflatten(1, (-1, dim)).transpose(0, 1)
        if values.bias is not None:
            projected = projected + values.bias.to(dtype).view(-1, 1, dim)
        out[row] = projected.flatten(0, 1)
    return out


def _unpacked(side: Latents, dtype: torch.dtype) -> Tensor:
    """All packed tokens with their first channel, `[B, 1, T, R]`."""
    assert not isinstance(side.held.packed, PerHead)
    packed = side.held.packed.unpack(dtype)
    return packed if side.first is None else torch.cat([side.first.to(dtype), packed], dim=3)


def _keys(side: Latents, x: Tensor, dim: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Keys before RoPE, `[H, T, D]`, of a row's latents `[1, T, R]`."""
    projected = rounded(rounded(x[0]) @ side.weight.to(x) + (0 if side.bias is None else side.bias.to(x)))
    projected = projected.unflatten(1, (-1, dim)).transpose(0, 1)
    return projected if side.norm is None else rounded(_normed(projected, side.norm))


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """`[H, T, D]` after the keys' norm."""
    if norm.kind == "layer":
        x = x - x.mean(dim=-1, keepdim=True)
    return x * (x.square().mean(dim=-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight.to(x)[:, None]
