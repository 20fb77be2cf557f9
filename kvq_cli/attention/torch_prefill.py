"""Causal attention of several queries per row over a compressed layer in PyTorch.

On a GPU, where PyTorch's fused attention computes what the model asks for, see `whole_prefill`. Else, in float32,
tokens are decoded a tile at a time. Tokens that all queries of a block see alike need no mask; the other tokens of a
tile, those near the diagonal, are computed together, with a mask. Results over different tokens are merged by the
logarithms of their softmax sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvq_cli.attention import whole_prefill
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.prefill_mask import UNLIMITED, Edge, Part, Sight, block_mask
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.attention.whole_prefill import whole_attention
from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import StreamReader

#: Tokens that are decoded at a time.
TILE = 2048
#: Queries of a block, where they see all tokens of a tile alike, and where some need a mask. Runs of fewer tokens than
#: `MASKED_QUERIES` are computed with the mask, too.
QUERIES, MASKED_QUERIES = 256, 128
#: Devices that compute scores, softmax and sum of a tile in one operation. On others tiles are for what is not plain.
TILED_DEVICES = ("cpu",)

#: Keys and values of a span before the pass that were not packed yet.
_Tails: TypeAlias = tuple[Tensor | None, Tensor | None]


def span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ForwardContext,
    span: RowSpan,
    tails: _Tails,
) -> Tensor:
    """Attention of the queries of one span, pads cut off: `[rows, query_heads, columns, head_dim]` -> the same shape,
    in their dtype or float32.

    key, value: those of the pass, `[rows, kv_heads, columns, head_dim]`, keys after RoPE. tails: those before it that
    were not packed yet, as the streams hold them.
    """
    window = context.layer.sliding_window
    start = 0 if window is None else max(0, span.past + 1 - window)
    rows = _rows_at_once(query, key, value, span.tokens - start, context.score_form)
    if rows == 0:
        return _in_tiles(query.float(), key.float(), value.float(), context, span, tails, start)
    outs = [
        _whole(query[part], key[part], value[part], context, own, _of(tails, part), start)
        for part, own in _row_parts(span, rows)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _whole(
    query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, span: RowSpan, tails: _Tails, start: int
) -> Tensor:
    """The same by `whole_attention`. start: the first token that a query sees."""
    keys, values, sight = _sides(key, value, context, span, tails)
    decoded_keys, decoded_values = (partial(side.tile, start, span.tokens) for side in (keys, values))
    return whole_attention(query, decoded_keys, decoded_values, sight, start, span.past, context.scaling)


def _in_tiles(
    query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, span: RowSpan, tails: _Tails, start: int
) -> Tensor:
    """The same in float32, a tile of tokens at a time."""
    form = context.score_form
    keys, values, sight = _sides(key, value, context, span, tails)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    sums = query.new_full(query.shape[:3], -torch.inf)
    if form.sinks is not None:  # a logit without a value, which came before all tokens
        grouped = sums.unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        sums = form.sink_logits(grouped).reshape(sums.shape).clone()
    for first in range(start, span.tokens, TILE):
        last = min(first + TILE, span.tokens)
        key_tile, value_tile = (side.tile(first, last) for side in (keys, values))
        for begin, end in _blocks(max(first, span.past), span.tokens, first, last, sight):
            part = slice(begin - span.past, end - span.past)
            for k, v, mask in _pieces(sight, begin, end, first, last, key_tile, value_tile):
                new, new_sums = _attend(query[:, :, part], k, v, context.scaling, form, mask)
                _merge(out[:, :, part], sums[:, :, part], new, new_sums)
    return out


def _sides(
    key: Tensor, value: Tensor, context: ForwardContext, span: RowSpan, tails: _Tails
) -> tuple[_Side, _Side, Sight]:
    """Keys and values of a span, and what its queries see."""
    layer = context.layer
    turn = None if layer.plan.keys.source == "post_rope" else layer.rotation
    keys = _side(layer.key_stream, key, tails[0], span, turn, context.compressed)
    values = _side(layer.value_stream, value, tails[1], span, None, context.compressed)
    return keys, values, Sight(keys.edge, values.edge, layer.sliding_window or UNLIMITED)


def _rows_at_once(query: Tensor, key: Tensor, value: Tensor, tokens: int, form: ScoreForm) -> int:
    """How many rows of so many tokens `whole_attention` computes; 0: it computes none.

    Fused attention needs a head_dim of whole 16 bytes: without it PyTorch would hold all scores.
    """
    fused = form is PLAIN and query.shape[3] == value.shape[3] and query.shape[3] % 8 == 0
    if query.device.type in TILED_DEVICES or not fused:
        return 0
    return whole_prefill.NUMBERS // (tokens * key.shape[1] * key.shape[3])


def _row_parts(span: RowSpan, rows: int) -> Iterator[tuple[slice, RowSpan]]:
    """The span in parts of `rows` rows: their places in it, and their own span."""
    first, stop = span.rows.start, span.rows.stop
    for begin in range(first, stop, rows):
        end = min(begin + rows, stop)
        yield slice(begin - first, end - first), replace(span, rows=slice(begin, end))


def _of(tails: _Tails, rows: slice) -> _Tails:
    keys, values = tails
    return None if keys is None else keys[rows], None if values is None else values[rows]


# -- tiles of tokens and blocks of queries ----------------------------------------------------------------------------


@dataclass
class _Side:
    """Keys or values during a prefill.

    new: tokens [new_start, end) in full precision: those that were not packed before this pass.
    """

    stream: StreamReader
    span: RowSpan
    edge: Edge
    new: Tensor
    new_start: int
    turn: Rotation | None

    def tile(self, first: int, last: int) -> _Tile:
        """Tokens [first, last), decoded as far as a query sees them so."""
        stop = min(last, self.edge.at(self.span.tokens - 1))
        stored = self._stored(first, stop) if first < stop else None
        return _Tile(first, stored, self.new_start, self.new)

    def _stored(self, first: int, last: int) -> Tensor:
        """Tokens [first, last) as stored, sinks and packed ones, `[rows, kv_heads, last - first, head_dim]` float32."""
        rows, tokens = self.span.rows, self.span.tokens
        coder = self.stream.coder(rows)
        pieces = [x.float() for _, _, x in self.stream.exact(rows, tokens, first, last) if x.shape[2]]
        for begin, _, packed in self.stream.packed(rows, tokens, first, last, last):
            x = coder.decode(packed, torch.float32)
            pieces.append(x[:, :, max(first - begin, 0) : last - begin])
        x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return x if self.turn is None else self.turn.at(x, first + self.span.offset)


class _Tile(NamedTuple):
    """Keys or values of tokens, as stored from `first` on, and in full precision from `new_start` on."""

    first: int
    stored: Tensor | None
    new_start: int
    new: Tensor

    def numbers(self, stored: bool, begin: int, end: int) -> Tensor:
        """Tokens [begin, end)."""
        if not stored:
            return self.new[:, :, begin - self.new_start : end - self.new_start]
        if self.stored is None:
            raise ValueError("no query sees these tokens as stored")
        return self.stored[:, :, begin - self.first : end - self.first]


def _side(
    stream: StreamReader, new: Tensor, tail: Tensor | None, span: RowSpan, turn: Rotation | None, compressed: bool
) -> _Side:
    """new: the keys or values of the pass. tail: those before it that were not yet packed."""
    window, start = stream.window, stream.split(span.past)[1]
    if tail is not None:
        tail = tail.float()
        if turn is not None:
            tail = turn.at(tail, start + span.offset)
        new = torch.cat([tail, new], dim=2)
    fixed = None if compressed else window.sinks + window.packed(span.past)
    return _Side(stream, span, Edge(window, fixed), new, start, turn)


def _blocks(begin: int, stop: int, first: int, last: int, sight: Sight) -> Iterator[tuple[int, int]]:
    """Blocks of the queries [begin, stop) for the tile of tokens [first, last)."""
    unlimited = sight.first(stop - 1) <= first  # no sliding window ends in the tile
    while begin < stop:
        alike = unlimited and min(sight.keys.at(begin), sight.values.at(begin)) >= last
        end = min(begin + (QUERIES if alike else MASKED_QUERIES), stop)
        yield begin, end
        begin = end


def _pieces(
    sight: Sight, begin: int, end: int, first: int, last: int, keys: _Tile, values: _Tile
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and mask `[queries, tokens]` of the parts of the tile [first, last) that queries [begin, end) see,
    and that are computed separately. mask: added to scores; None: all queries see all tokens."""
    masked: list[Part] = []
    for number, (oldest, newest) in enumerate(zip(sight.runs(begin), sight.runs(end - 1), strict=True)):
        start, all_start, all_stop, stop = (
            min(max(edge, first), last) for edge in (oldest.start, newest.start, oldest.stop, newest.stop)
        )
        stored = oldest.key_stored, oldest.value_stored
        if all_stop - all_start >= MASKED_QUERIES:
            yield keys.numbers(stored[0], all_start, all_stop), values.numbers(stored[1], all_start, all_stop), None
            masked += [Part(number, *stored, start, all_start), Part(number, *stored, all_stop, stop)]
        else:
            masked.append(Part(number, *stored, start, stop))
    masked = [part for part in masked if part.start < part.stop]
    if masked:
        k = torch.cat([keys.numbers(part.key_stored, part.start, part.stop) for part in masked], dim=2)
        v = torch.cat([values.numbers(part.value_stored, part.start, part.stop) for part in masked], dim=2)
        yield k, v, block_mask(sight, begin, end, masked, k.device)


# -- attention over a part of the tokens -------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, form: ScoreForm, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention to these tokens alone, `[rows, query_heads, queries, head_dim]`, and ln(sum of exp(score))
    `[rows, query_heads, queries]`."""
    if q.device.type in TILED_DEVICES and form is PLAIN and q.shape[3] == v.shape[3]:
        # The function behind scaled_dot_product_attention on a CPU, which returns the sums, too.
        # It reads wrong numbers where the channels of a token are not adjacent, without an error.
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scaling)
    scores = form.capped(q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * scaling)
    scores = scores if mask is None else scores + mask
    sums = scores.logsumexp(dim=-1, keepdim=True)
    return (scores.sub_(sums).exp_() @ v.unsqueeze(2)).flatten(1, 2), sums.squeeze(-1).flatten(1, 2)


def _merge(out: Tensor, sums: Tensor, new: Tensor, new_sums: Tensor) -> None:
    """Add results over more tokens to `out` and `sums`, in place; all as `_attend` returns them."""
    out.lerp_(new, (new_sums - sums).sigmoid_().unsqueeze(-1))
    sums.copy_(torch.logaddexp(sums, new_sums))
