"""Numbers as the blocks that a codebook is made for, and which of them to cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.methods.base import BlockShape


def to_blocks(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """`[samples, tokens, kv_heads, head_dim]` -> `[kv_heads * head_dim / share, blocks, shape.size]`.

    One row for each codebook: that of `share` adjacent channels of a head. Within a block number `j * c + i` is token
    j, channel i, as in the codec.
    """
    return _split(x, shape, share).permute(3, 4, 0, 1, 5, 2, 6).reshape(_books(x, share), -1, shape.size)


def block_sums(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """The sum of each of `to_blocks`, `[kv_heads * head_dim / share, blocks]`."""
    return _split(x, shape, share).sum((2, 6)).permute(2, 3, 0, 1, 4).reshape(_books(x, share), -1)


def _split(x: Tensor, shape: BlockShape, share: int) -> Tensor:
    """`[samples, runs of l tokens, l, kv_heads, codebooks of a head, chunks of c channels, c]`."""
    samples, tokens, heads, head_dim = x.shape
    return x.reshape(
        samples, tokens // shape.tokens, shape.tokens, heads, head_dim // share, share // shape.channels, shape.channels
    )


def _books(x: Tensor, share: int) -> int:
    return x.shape[2] * (x.shape[3] // share)


def draw_coreset(points: Tensor, weights: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` of each codebook's points, in random order, with weights that keep every weighted sum unbiased.

    points: `[codebooks, points, size]`, weights: `[codebooks, points]`. Points are drawn with probability
    q = w / (2 sum w) + w D^2 / (2 sum w D^2), where D is the distance to the weighted mean (a coreset: few points stand
    for the clustering error of all), at even steps of the cumulated q, and weigh w / (count q).
    """
    generator = torch.Generator().manual_seed(seed)
    books, size = points.shape[0], points.shape[2]
    if points.shape[1] <= count:
        order = torch.randperm(points.shape[1], generator=generator).to(points.device)
        return points[:, order], weights[:, order]
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total == 0, torch.ones_like(weights), weights)
    share = weights / weights.sum(-1, keepdim=True)
    center = share.unsqueeze(1) @ points
    spread = share * (points - center).square().sum(-1)
    q = share / 2 + spread / (2 * spread.sum(-1, keepdim=True)).clamp_min(1e-30)
    cumulated = q.double().cumsum(-1)
    steps = (torch.arange(count) + torch.rand(books, 1, generator=generator)).to(points.device) / count
    index = torch.searchsorted(cumulated, steps * cumulated[:, -1:]).clamp_max(points.shape[1] - 1)
    index = index[:, torch.randperm(count, generator=generator).to(points.device)]
    drawn = points.gather(1, index[..., None].expand(-1, -1, size))
    return drawn, weights.gather(1, index) / (count * q.gather(1, index))
