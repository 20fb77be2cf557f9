"""Attention over a compressed layer in plain PyTorch, a tile of tokens at a time, softmax in float32.

The rows of a `RowGroup` are computed together; every function below the public ones sees one group, whose rows all hold
the same number of tokens. Token i of a group has index i in its keys and in its values alike, although the two streams
may split differently into sinks, packed and recent.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import TILE as ROTATION_TILE
from kvq_cli.attention.torch_prefill import group_attention
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import RowGroup
from kvq_cli.cache.stream import StreamReader
from kvq_cli.codecs.base import Codec, Packed

#: Numbers decoded at a time for one query per row: about a core's cache.
DECODE_NUMBERS = 1 << 19


def decode_attention(query: Tensor, context: ForwardContext) -> Tensor:
    """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; see `Backend`."""
    groups = context.forward.row_groups
    if len(groups) == 1 and groups[0].pads == 0:
        return _decode(query, context, groups[0])
    out = torch.zeros_like(query)
    for group in groups:
        if group.pads == 0:
            out[group.rows] = _decode(query[group.rows], context, group)
    return out


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
    """Causal attention of several queries per row; see `Backend`."""
    layer, out = context.layer, torch.zeros_like(query)
    # Decoding reads even the newest tokens from layer inputs, whose factors are rounded to 16 bits.
    stored = layer.rematerialized() if context.compressed else None
    for number, group in enumerate(context.forward.row_groups):
        if group.tokens > group.past:
            q, k, v = (x[group.rows, :, group.pads :].float() for x in (query, *(stored or (key, value))))
            if stored is not None:
                k = layer.rotation.at(k, group.past + group.offset)
            tails = layer.tails[number] if layer.tails else (None, None)
            out[group.rows, :, group.pads :] = group_attention(q, k, v, context, group, tails).to(out.dtype)
    return out


# -- one query per row -------------------------------------------------------------------------------------------


def _decode(query: Tensor, context: ForwardContext, group: RowGroup) -> Tensor:
    layer, form = context.layer, context.score_form
    heads, start = layer.kv_heads, _first_seen(layer, group.tokens - 1)
    # [rows, kv_heads, group, head_dim]
    q = (query.float() * context.scaling).reshape(query.shape[0], heads, -1, query.shape[3])
    weights = form.weights(form.capped(_key_scores(q, layer, group, start)))
    return _value_sum(weights, layer, group, start, normalized=form.sinks is None).to(query.dtype).view(query.shape)


def _key_scores(q: Tensor, layer: CompressedLayer, group: RowGroup, start: int) -> Tensor:
    """q . k of all tokens from `start` on: `[rows, kv_heads, group, head_dim]` -> `[..., tokens - start]`, float32."""
    keys = _pieces(layer.key_stream, group, start)
    if layer.plan.keys.source == "post_rope":
        return torch.cat([piece.products(q) for piece in keys], dim=-1)
    turn = layer.rotation
    queries = turn.back(q, tuple(piece.first + group.offset for piece in keys))
    products = [x @ turn.ahead(piece.numbers()).transpose(2, 3) for x, piece in zip(queries, keys, strict=True)]
    return torch.cat(products, dim=-1)


def _value_sum(weights: Tensor, layer: CompressedLayer, group: RowGroup, start: int, normalized: bool) -> Tensor:
    """Sum of weight times value over the tokens from `start` on, `[rows, kv_heads, group, head_dim]` float32.

    normalized: the weights add up to 1, as projecting a weighted sum of layer inputs needs it.
    """
    stream, finish = layer.summed
    if not normalized:
        stream, finish = layer.value_stream, None
    values, shape = _pieces(stream, group, start), weights.shape[:3]
    heads = layer.kv_heads if finish is None else 1  # layer inputs and latents have one head
    weights = weights.view(shape[0], heads, -1, weights.shape[3])
    out = values[0].weighted_sum(weights[..., : values[0].last - start])
    for piece in values[1:]:
        out += piece.weighted_sum(weights[..., piece.first - start : piece.last - start])
    return out if finish is None else finish(out.view(*shape, -1))


class _Piece(NamedTuple):
    """Tokens [first, last) of a group: a view in full precision, or packed ones after `cut` others."""

    first: int
    last: int
    stored: Tensor | Packed
    codec: Codec
    cut: int = 0

    def numbers(self) -> Tensor:
        """`[rows, kv_heads, last - first, head_dim]` float32."""
        if isinstance(self.stored, Tensor):
            return self.stored.float()
        return self.codec.decode_by_channel(self.stored).mT[:, :, self.cut :]

    def products(self, q: Tensor) -> Tensor:
        """q . k of the tokens: `[rows, kv_heads, group, head_dim]` -> `[rows, kv_heads, group, last - first]`."""
        if isinstance(self.stored, Tensor) or self.cut:
            return q @ self.numbers().transpose(2, 3)
        return self.codec.products(q, self.stored)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sums over the tokens: weights `[rows, kv_heads, group, tokens]` -> `[rows, kv_heads, group, head_dim]`."""
        if isinstance(self.stored, Tensor) or self.cut:
            return weights @ self.numbers()
        return self.codec.weighted_sum(weights, self.stored)


def _pieces(stream: StreamReader, group: RowGroup, start: int) -> list[_Piece]:
    """All tokens from `start` on, in order, tiles of at most `DECODE_NUMBERS`; nothing is decoded yet."""
    token = (group.rows.stop - group.rows.start) * stream.ring.shape[1] * stream.ring.shape[3]
    bounds = (group.rows, group.tokens, start, group.tokens, min(ROTATION_TILE, -(-DECODE_NUMBERS // token)))
    coder = stream.coder(group.rows)
    pieces = [_Piece(*piece, coder) for piece in stream.exact(*bounds)]
    for first, last, packed in stream.packed(*bounds):
        cut = max(0, start - first)
        pieces.append(_Piece(first + cut, last, packed, coder, cut))
    pieces.sort(key=attrgetter("first"))
    return pieces


def _first_seen(layer: CompressedLayer, query: int) -> int:
    """The first token that the query of token `query` sees."""
    return 0 if layer.sliding_window is None else max(0, query + 1 - layer.sliding_window)
