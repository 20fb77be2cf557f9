"""Attention over a compressed layer in plain PyTorch, a tile of tokens at a time, softmax in float32.

The rows of a `RowSpan` hold the same number of tokens, and are computed together; so are sinks and packed tokens of
rows of about the same length. Token i of a row has index i in its keys and in its values alike, although the two
streams may split differently into sinks, packed and recent.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import TILE as ROTATION_TILE
from kvq_cli.attention.torch_prefill import span_attention
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import StreamReader
from kvq_cli.codecs.base import Codec, Packed

#: Numbers decoded at a time for one query per row: on a CPU about a core's cache; on a GPU 128 MB, since a piece of any
#: size takes some tens of launches.
DECODE_NUMBERS, DECODE_NUMBERS_GPU = 1 << 19, 1 << 25
#: Tokens that rows are read further than their own packed tokens, for pieces of all rows.
JOINED_MORE = 128


def decode_attention(query: Tensor, context: ForwardContext) -> Tensor:
    """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; see `Backend`."""
    layer, form = context.layer, context.score_form
    spans = context.forward.row_spans
    if all(span.pads for span in spans):  # no row has a token
        return torch.zeros_like(query)
    # [rows, kv_heads, queries, head_dim]
    q = (query.float() * context.scaling).reshape(query.shape[0], layer.kv_heads, -1, query.shape[3])
    start = min(_first_seen(layer, span) for span in spans)
    scores = form.capped(_key_scores(q, layer, spans, start))
    for span in spans:
        for unseen in (slice(0, _first_seen(layer, span) - start), slice(span.tokens - start, scores.shape[-1])):
            if unseen.stop > unseen.start:
                scores[span.rows, ..., unseen] = float("-inf")
    weights = form.weights(scores)
    return _value_sum(weights, layer, spans, start, normalized=form.sinks is None).to(query.dtype).view(query.shape)


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
    """Causal attention of several queries per row; see `Backend`."""
    layer, out = context.layer, torch.zeros_like(query)
    # Decoding reads even the newest tokens from layer inputs, whose factors are rounded to 16 bits.
    stored = layer.rematerialized() if context.compressed else None
    for number, span in enumerate(context.forward.row_spans):
        if span.tokens > span.past:
            q, k, v = (x[span.rows, :, span.pads :] for x in (query, *(stored or (key, value))))
            if stored is not None:
                k = layer.rotation.at(k.float(), span.past + span.offset)
            tails = layer.tails[number] if layer.tails else (None, None)
            out[span.rows, :, span.pads :] = span_attention(q, k, v, context, span, tails).to(out.dtype)
    return out


# -- one query per row -------------------------------------------------------------------------------------------


def _key_scores(q: Tensor, layer: CompressedLayer, spans: Sequence[RowSpan], start: int) -> Tensor:
    """q . k of all tokens from `start` on: `[rows, kv_heads, queries, head_dim]` -> `[..., tokens - start]`, float32;
    anything behind the tokens of a shorter row."""
    turn = None if layer.plan.keys.source == "post_rope" else layer.rotation
    keys = _pieces(layer.key_stream, spans, start, by_position=turn is not None)
    scores = q.new_zeros(*q.shape[:3], max(span.tokens for span in spans) - start)
    queries = None if turn is None else turn.back(q, tuple(piece.position for piece in keys))
    for number, piece in enumerate(keys):  # in order: a row's own pieces replace what a piece of all rows read
        if turn is None or queries is None:
            products = piece.products(q[piece.rows])
        else:
            products = queries[number, piece.rows] @ turn.ahead(piece.numbers()).transpose(2, 3)
        scores[piece.rows, ..., piece.first - start : piece.last - start] = products
    return scores


def _value_sum(
    weights: Tensor, layer: CompressedLayer, spans: Sequence[RowSpan], start: int, normalized: bool
) -> Tensor:
    """Sum of weight times value over the tokens from `start` on, `[rows, kv_heads, queries, head_dim]` float32; zeros
    for rows without tokens.

    normalized: the weights add up to 1, as projecting a weighted sum of layer inputs needs it.
    """
    stream, finish = layer.summed
    if not normalized:
        stream, finish = layer.value_stream, None
    shape = weights.shape[:3]
    heads = layer.kv_heads if finish is None else 1  # layer inputs and latents have one head
    weights = weights.view(shape[0], heads, -1, weights.shape[3])
    out = None
    for piece in _pieces(stream, spans, start):
        part = piece.weighted_sum(piece.of(weights, start))
        if out is None:
            out = part.new_zeros(shape[0], *part.shape[1:])
        out[piece.rows].add_(part)
    assert out is not None
    return out if finish is None else finish(out.view(*shape, -1))


class _Piece(NamedTuple):
    """Tokens [first, last) of some rows: a view in full precision, or packed ones after `cut` others.

    position: of the first. shorter: rows whose packed tokens end earlier, and where; behind that, anything is read.
    """

    rows: slice
    position: int
    first: int
    last: int
    stored: Tensor | Packed
    codec: Codec
    cut: int = 0
    shorter: tuple[tuple[slice, int], ...] = ()

    def of(self, weights: Tensor, start: int) -> Tensor:
        """The tokens' weights, of `weights` `[all rows, ..., tokens]` from token `start` on; 0 where a row has no such
        token packed."""
        own = weights[self.rows, ..., self.first - start : self.last - start]
        if any(end < self.last for _, end in self.shorter):
            own = own.clone()
            for rows, end in self.shorter:
                own[rows, ..., max(0, end - self.first) :] = 0
        return own

    def numbers(self) -> Tensor:
        """`[rows, kv_heads, last - first, head_dim]` float32."""
        if isinstance(self.stored, Tensor):
            return self.stored.float()
        return self.codec.decode_by_channel(self.stored).mT[:, :, self.cut :]

    def products(self, q: Tensor) -> Tensor:
        """q . k of the tokens: `[rows, kv_heads, queries, head_dim]` -> `[rows, kv_heads, queries, last - first]`."""
        if isinstance(self.stored, Tensor) or self.cut:
            return q @ self.numbers().transpose(2, 3)
        return self.codec.products(q, self.stored)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sums over tokens: weights `[rows, kv_heads, queries, tokens]` -> `[rows, kv_heads, queries, head_dim]`."""
        if isinstance(self.stored, Tensor) or self.cut:
            return weights @ self.numbers()
        return self.codec.weighted_sum(weights, self.stored)


def _pieces(stream: StreamReader, spans: Sequence[RowSpan], start: int, by_position: bool = False) -> list[_Piece]:
    """All tokens of all rows from `start` on, tiles of about `DECODE_NUMBERS`; nothing is decoded yet.

    Of spans of about the same length, sinks and packed tokens come first, in pieces of all rows: one operation for all
    takes as long as for one. by_position: only where tokens have the same positions in all rows.
    """
    pieces, sinks, joined = list[_Piece](), 0, 0
    offsets = {span.offset if by_position else 0 for span in spans}
    if len(spans) > 1 and len(offsets) == 1 and stream.joins_rows and not any(span.pads for span in spans):
        ends = [(stream.split(span.tokens)[1], span) for span in spans]
        shortest = min(end for end, _ in ends)
        if shortest >= stream.window.sinks:
            joined, longest = max((each for each in ends if each[0] <= shortest + JOINED_MORE), key=itemgetter(0))
            sinks, rows = stream.window.sinks, slice(0, spans[-1].rows.stop)
            shorter = tuple((span.rows, end) for end, span in ends if end < joined)
            pieces = _pieces_of(stream, rows, longest, (start, start), joined, by_position, shorter)
    for span in spans:
        if span.pads == 0:
            starts = max(start, sinks), max(start, joined)
            pieces += _pieces_of(stream, span.rows, span, starts, span.tokens, by_position)
    return pieces


def _pieces_of(
    stream: StreamReader,
    rows: slice,
    span: RowSpan,
    starts: tuple[int, int],
    stop: int,
    by_position: bool,
    shorter: tuple[tuple[slice, int], ...] = (),
) -> list[_Piece]:
    """Tokens up to `stop` of `rows`, as `span` holds them: those in full precision, and packed ones, from `starts` on,
    each in order."""
    token = (rows.stop - rows.start) * stream.ring.shape[1] * stream.ring.shape[3]
    cpu = stream.ring.device.type == "cpu"
    size, coder, offset = -(-(DECODE_NUMBERS if cpu else DECODE_NUMBERS_GPU) // token), stream.coder(rows), span.offset
    if cpu or by_position:
        size = min(size, ROTATION_TILE)
    exact = stream.exact(rows, span.tokens, starts[0], stop, size)
    pieces = [_Piece(rows, first + offset, first, last, x, coder) for first, last, x in exact]
    for first, last, packed in stream.packed(rows, span.tokens, starts[1], stop, size):
        cut = max(0, starts[1] - first)
        pieces.append(_Piece(rows, first + cut + offset, first + cut, last, packed, coder, cut, shorter))
    return sorted(pieces, key=attrgetter("first"))


def _first_seen(layer: CompressedLayer, span: RowSpan) -> int:
    """The first token that the newest query of a span sees."""
    return 0 if layer.sliding_window is None else max(0, span.tokens - layer.sliding_window)
