"""Split activations into the blocks that codebooks are clustered from, and draw a coreset of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.methods.specs import BlockShape


def to_blocks(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """`[samples, tokens, kv_heads, head_dim]` -> `[codebooks, blocks, shape.size]`.

    codebooks = kv_heads * head_dim / share: one for each `share` adjacent channels of a head. Within a block, number
    `j * c + i` is token j, channel i, as in `CodebookCodec`.
    """
    return _split(x, shape, share).permute(3, 4, 0, 1, 5, 2, 6).reshape(_codebooks(x, share), -1, shape.size)


def block_sums(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """The sum over each block of `to_blocks`, `[codebooks, blocks]`."""
    return _split(x, shape, share).sum((2, 6)).permute(2, 3, 0, 1, 4).reshape(_codebooks(x, share), -1)


def _split(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """`[samples, tokens / l, l, kv_heads, codebooks per head, channels per codebook / c, c]`."""
    samples, tokens, heads, head_dim = x.shape
    return x.reshape(
        samples, tokens // shape.tokens, shape.tokens, heads, head_dim // share, share // shape.channels, shape.channels
    )


def _codebooks(x: Tensor, share: int) -> int:
    return x.shape[2] * (x.shape[3] // share)


def draw_coreset(points: Tensor, weights: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` points per codebook, in random order, with weights that keep weighted sums unbiased.

    points: `[codebooks, points, size]`, weights: `[codebooks, points]`. A point is drawn with probability
    q = w / (2 sum w) + w D^2 / (2 sum w D^2), D its distance to the weighted mean (a coreset for k-means: few points
    represent the clustering error of all), by systematic sampling over the cumulated q, and gets the weight
    w / (count q).
    """
    generator = torch.Generator().manual_seed(seed)
    codebooks, size = points.shape[0], points.shape[2]
    if points.shape[1] <= count:
        order = torch.randperm(points.shape[1], generator=generator).to(points.device)
        return points[:, order], weights[:, order]
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total == 0, torch.ones_like(weights), weights)
    share = weights / weights.sum(-1, keepdim=True)
    center = share.unsqueeze(1) @ points
    spread = share * (points - center).square_().sum(-1)
    q = share / 2 + spread / (2 * spread.sum(-1, keepdim=True)).clamp_min(1e-30)
    cumulated = q.double().cumsum(-1)
    steps = torch.arange(count) + torch.rand(codebooks, 1, generator=generator, dtype=torch.float32)
    steps = steps.to(points.device) / count
    index = torch.searchsorted(cumulated, steps * cumulated[:, -1:]).clamp_max(points.shape[1] - 1)
    index = index[:, torch.randperm(count, generator=generator).to(points.device)]
    drawn = points.gather(1, index[..., None].expand(-1, -1, size))
    return drawn, weights.gather(1, index) / (count * q.gather(1, index))
