"""Codebooks over blocks of (tokens, channels): KVQuant (1, 1), ChannelKV (1, c), TemporalKV (l, 1) and between."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.codecs.base import Codec, Packed


class CodebookCodec(Codec):
    """A block of `l` adjacent tokens by `c` adjacent channels is kept as the index of its nearest centroid.

    centroids: `[kv_heads, head_dim / share, entries, l * c]`, 16 or 32 bits; `share` adjacent channels use one.
               An entry lists a block token by token: number `j * c + i` is token j, channel i.
    mean, std: `[kv_heads, head_dim]` or None; blocks are assigned as (x - mean) / std and decoded as c std + mean.

    Parts: `codes` `[B, H, T / l, head_dim / c]` uint8 (256 entries), unit l; fewer entries: int32 words, planar.
    """

    def __init__(
        self,
        centroids: Tensor,
        block: tuple[int, int],
        head_dim: int,
        mean: Tensor | None = None,
        std: Tensor | None = None,
    ) -> None:
        raise NotImplementedError

    def encode(self, x: Tensor) -> Packed:
        raise NotImplementedError

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError
