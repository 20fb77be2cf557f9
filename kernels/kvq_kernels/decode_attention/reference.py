"""Decode attention in plain PyTorch: unpack everything, then softmax(q K^T) V. The kernels' tests compare with it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvq_kernels.decode_attention.pages import gathered
from kvq_kernels.decode_attention.parts import PerHead, Rope, Side


def decode_attention_reference(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None = None,
    dtype: torch.dtype = torch.float32,
    round_to: torch.dtype | None = None,
    window: int | None = None,
) -> Tensor:
    """out = softmax(scaling q K^T) V of each row's first lengths[b] tokens, in `dtype`.

    query:    `[B, Q, D]`, or `[B, Q, k, D]` of each row's newest k tokens, which see no later ones. lengths: int32
              `[B]`.
    round_to: type that keys (after RoPE) and values are rounded to once they are dequantized; None: not rounded.
    window:   number of newest tokens to attend to, of each query; None: all.

    Returns the query's shape in `dtype`; zeros for queries without tokens.
    """
    queries = query if query.ndim == 4 else query.unsqueeze(2)
    out = torch.zeros(queries.shape, dtype=dtype, device=query.device)
    keys, values = gathered(keys), gathered(values)
    packed_keys, packed_values = (unpack_side(side, dtype, query.shape[-1]) for side in (keys, values))
    heads, count = packed_keys.shape[1], queries.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        k, v = row_tokens(keys, packed_keys, row, length), row_tokens(values, packed_values, row, length)
        if rope is not None:
            k = rotate(k, rope, 0 if rope.offset is None else int(rope.offset[row]))
        if round_to is not None:
            k, v = k.to(round_to).to(dtype), v.to(round_to).to(dtype)
        for number in range(count):
            stop = length - count + 1 + number  # behind the query's own token
            if stop <= 0:
                continue
            seen = slice(0 if window is None else max(0, stop - window), stop)
            q = queries[row, :, number].to(dtype).unflatten(0, (heads, -1))
            weights = (q @ k[:, seen].transpose(1, 2) * scaling).softmax(dim=-1)
            out[row, :, number] = (weights @ v[:, seen]).flatten(0, 1)
    return out.view(query.shape)


def row_tokens(side: Side, packed: Tensor, row: int, length: int) -> Tensor:
    """All tokens of a row from sinks, packed and ring, in order: `[H, length, D]`."""
    count = int(side.count[row])
    sinks = 0 if side.sinks is None else min(side.sinks.shape[2], length)
    norm = 1 if side.norm is None else side.norm[row, :, None].to(packed)
    pieces = [packed[row, :, :count]]
    if side.sinks is not None:
        pieces.insert(0, side.sinks[row, :, :sinks].to(packed) / norm)
    if length > sinks + count:
        assert side.ring is not None
        slots = torch.arange(count, length - sinks, device=packed.device) % side.ring.shape[2]
        pieces.append(side.ring[row, :, slots].to(packed) / norm)
    return torch.cat(pieces, dim=1)


def rotate(x: Tensor, rope: Rope, offset: int) -> Tensor:
    """RoPE: R(t + offset) of each token t of `[H, T, D]`."""
    half = rope.frequencies.numel()
    angles = torch.arange(offset, offset + x.shape[1], device=x.device, dtype=torch.float64)[:, None]
    angles = angles * rope.frequencies.double()
    cos, sin = ((f(angles) * rope.scale).to(x) for f in (torch.cos, torch.sin))
    pairs = (slice(0, half), slice(half, 2 * half))
    if rope.style == "interleaved":
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    first, second = (x[..., p] for p in pairs)
    out = x.clone()
    out[..., pairs[0]], out[..., pairs[1]] = first * cos - second * sin, second * cos + first * sin
    return out


def unpack_side(side: Side, dtype: torch.dtype, dim: int) -> Tensor:
    """All packed tokens with their outliers, `[B, H, T, dim]` in `dtype`."""
    if isinstance(side.packed, PerHead):
        parts = [member.unpack(dtype, dim) for member in side.packed.members]
        x = parts[0].new_empty(len(parts[0]), sum(map(len, side.packed.heads)), *parts[0].shape[2:])
        for part, heads in zip(parts, side.packed.heads, strict=True):
            x.index_copy_(1, _index(heads, x.device), part)
    else:
        x = side.packed.unpack(dtype, dim)
    if side.outliers is None:
        return x
    blocks = x.unflatten(2, (-1, side.outliers.tokens)).flatten(3)
    # Blocks past a row's count may have any bits.
    index, value = side.outliers.index.long().clamp(0, blocks.shape[3] - 1), side.outliers.value.to(dtype)
    if side.outliers.start is None:
        return blocks.scatter(3, index, value).view(x.shape)
    slot = torch.arange(index.shape[3], device=index.device)
    head = (slot[:, None] >= side.outliers.start[..., None, 1:-1]).sum(-1)  # [B, 1, T / tokens, K]
    numbers = blocks.shape[3]
    pooled = blocks.transpose(1, 2).flatten(2)  # [B, T / tokens, H * numbers]
    pooled = pooled.scatter(2, (head * numbers + index)[:, 0], value[:, 0])
    return pooled.unflatten(2, (-1, numbers)).transpose(1, 2).reshape(x.shape)


@cache
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """The heads as a tensor that is sent to the device once."""
    return torch.tensor(heads, device=device)
