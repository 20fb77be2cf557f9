"""Attention where packed keys or values were rotated: in their rotated channels, so that kernels read the codes as they
are. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from kvq_kernels.decode_attention import Side
from kvq_kernels.decode_attention.arguments import kv_heads
from torch import Tensor

from kvq_cli.codecs.base import AnyCodec


def attend_rotated(
    attend: Callable[[Tensor, Side, Side], Tensor],
    query: Tensor,
    keys: Side,
    values: Side,
    codecs: tuple[AnyCodec, AnyCodec],
) -> Tensor:
    """`attend(query, keys, values)`, where the codecs of keys and values may have rotated channels: (R q) . (R k) is
    q . k, and a weighted sum of rotated values is rotated back.

    query: `[rows, query_heads, head_dim]` or `[rows, query_heads, queries, head_dim]`; the result has its shape and
    type. Rotated queries are rounded to it, rotated sinks and recent tokens are float32.
    """
    of_keys, of_values = (
        None if codec.rotation is None else codec.rotation.transposed(query.device) for codec in codecs
    )
    if of_keys is None and of_values is None:
        return attend(query, keys, values)
    turned, heads = query, kv_heads(keys)
    if of_keys is not None:
        turned, keys = _by_head(query, of_keys, heads), _rotated(keys, of_keys)
    if of_values is not None:
        values = _rotated(values, of_values)
    out = attend(turned.to(query.dtype).contiguous(), keys, values)
    return (out if of_values is None else _by_head(out, of_values.mT, heads)).to(query.dtype)


@torch.no_grad()
def _by_head(x: Tensor, matrix: Tensor, heads: int) -> Tensor:
    """Rows of `x` times the matrix of each query head's kv head, or of all, in float32."""
    return (x.float().unflatten(1, (heads, -1)).flatten(2, -2) @ matrix).reshape(x.shape)


@torch.no_grad()
def _rotated(side: Side, matrix: Tensor) -> Side:
    """The side whose sinks and recent tokens are rotated as the packed ones are."""
    sinks, ring = (None if x is None else x.float() @ matrix for x in (side.sinks, side.ring))
    return replace(side, sinks=sinks, ring=ring)
