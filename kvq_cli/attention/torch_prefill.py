"""Causal attention of several queries per row over a compressed layer in PyTorch, in float32.

Tokens are decoded a tile at a time. Tokens that all queries of a block see alike need no mask; the other tokens of a
tile, those near the diagonal, are computed together, with a mask. Results over different tokens are merged by the
logarithms of their softmax sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import StreamReader
from kvq_cli.methods.window import Window

#: Tokens that are decoded at a time.
TILE = 2048
#: Queries of a block, where they see all tokens of a tile alike, and where some need a mask. Runs of fewer tokens than
#: `MASKED_QUERIES` are computed with the mask, too.
QUERIES, MASKED_QUERIES = 256, 128
#: Added to scores of hidden tokens: finite, so that a query that sees no token of a tile gives no NaN but a result that
#: merging ignores.
HIDDEN = -1e30


def span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ForwardContext,
    span: RowSpan,
    tails: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Attention of the queries of one span, pads cut off: float32 `[rows, query_heads, columns, head_dim]` -> the same
    shape.

    key, value: those of the pass, `[rows, kv_heads, columns, head_dim]`, keys after RoPE. tails: those before it that
    were not packed yet, as the streams hold them.
    """
    layer, form = context.layer, context.score_form
    turn = None if layer.plan.keys.source == "post_rope" else layer.rotation
    keys = _side(layer.key_stream, key, tails[0], span, turn, context.compressed)
    values = _side(layer.value_stream, value, tails[1], span, None, context.compressed)
    ends = torch.arange(span.past, span.tokens) + 1
    low = torch.zeros_like(ends) if layer.sliding_window is None else (ends - layer.sliding_window).clamp_(min=0)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    sums = query.new_full(query.shape[:3], -torch.inf)
    if form.sinks is not None:  # a logit without a value, which came before all tokens
        grouped = sums.unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        sums = form.sink_logits(grouped).reshape(sums.shape).clone()
    for first in range(int(low[0]), span.tokens, TILE):
        last = min(first + TILE, span.tokens)
        key_tile, value_tile = (side.tile(first, last) for side in (keys, values))
        for part in _blocks(max(first, span.past) - span.past, last, keys.edges, values.edges, int(low[-1]) <= first):
            runs = _runs(low[part], keys.edges[part], values.edges[part], ends[part])
            for k, v, mask in _pieces(runs, first, last, key_tile, value_tile):
                new, new_sums = _attend(query[:, :, part], k, v, context.scaling, form, mask)
                _merge(out[:, :, part], sums[:, :, part], new, new_sums)
    return out


# -- what queries see --------------------------------------------------------------------------------------------------


@dataclass
class _Side:
    """Keys or values during a prefill.

    edges: of each query, the first token that it sees as `new`; earlier ones it sees as stored. int64, on the CPU.
    new:   tokens [new_start, end) in full precision: those that were not packed before this pass.
    """

    stream: StreamReader
    span: RowSpan
    edges: Tensor
    new: Tensor
    new_start: int
    turn: Rotation | None

    def tile(self, first: int, last: int) -> _Tile:
        """Tokens [first, last), decoded as far as a query sees them so."""
        stop = min(last, int(self.edges[-1]))
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
    return _Side(stream, span, _edges(window, span.past, span.tokens, compressed), new, start, turn)


@lru_cache(maxsize=8)
def _edges(window: Window, past: int, tokens: int, compressed: bool) -> Tensor:
    """`_Side.edges` of the queries [past, tokens): int64. Cached, since other layers need the same."""
    packed = [window.packed(end if compressed else past) for end in range(past + 1, tokens + 1)]
    return torch.minimum(torch.tensor(packed) + window.sinks, torch.arange(past, tokens) + 1)


def _blocks(begin: int, last: int, key_edges: Tensor, value_edges: Tensor, unlimited: bool) -> Iterator[slice]:
    """Blocks of queries, counted from the first of the pass, for a tile of tokens up to `last`. unlimited: no sliding
    window ends in the tile."""
    while begin < len(key_edges):
        alike = unlimited and min(int(key_edges[begin]), int(value_edges[begin])) >= last
        end = min(begin + (QUERIES if alike else MASKED_QUERIES), len(key_edges))
        yield slice(begin, end)
        begin = end


class _Run(NamedTuple):
    """Tokens whose key and value queries see as stored or new: query i those of [start[i], stop[i]). Neither start nor
    stop decreases from query to query."""

    key_stored: bool
    value_stored: bool
    start: Tensor
    stop: Tensor


def _runs(low: Tensor, key_edges: Tensor, value_edges: Tensor, ends: Tensor) -> list[_Run]:
    """All tokens that a block of queries sees; low, ends: the first, and the one after the last, for each query."""
    lower, upper = torch.minimum(key_edges, value_edges), torch.maximum(key_edges, value_edges)
    return [
        _Run(True, True, low, lower),
        _Run(True, False, torch.maximum(low, value_edges), key_edges),
        _Run(False, True, torch.maximum(low, key_edges), value_edges),
        _Run(False, False, torch.maximum(low, upper), ends),
    ]


def _pieces(
    runs: list[_Run], first: int, last: int, keys: _Tile, values: _Tile
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and mask `[queries, tokens]` of the parts of a tile that are computed separately. mask: added to
    scores; None: all queries see all tokens."""
    masked: list[tuple[_Run, int, int]] = []
    for run in runs:
        start, all_start, all_stop, stop = (
            min(max(int(edge), first), last) for edge in (run.start[0], run.start[-1], run.stop[0], run.stop[-1])
        )
        if all_stop - all_start >= MASKED_QUERIES:
            yield (
                keys.numbers(run.key_stored, all_start, all_stop),
                values.numbers(run.value_stored, all_start, all_stop),
                None,
            )
            masked += [(run, start, all_start), (run, all_stop, stop)]
        else:
            masked.append((run, start, stop))
    masked = [(run, start, stop) for run, start, stop in masked if start < stop]
    if masked:
        k = torch.cat([keys.numbers(run.key_stored, start, stop) for run, start, stop in masked], dim=2)
        v = torch.cat([values.numbers(run.value_stored, start, stop) for run, start, stop in masked], dim=2)
        yield k, v, torch.cat([_mask(*part) for part in masked], dim=1).to(k.device)


def _mask(run: _Run, start: int, stop: int) -> Tensor:
    """0 where a query sees a token of [start, stop), else `HIDDEN`: float32 `[queries, stop - start]`."""
    tokens = torch.arange(start, stop)
    hidden = (tokens < run.start.unsqueeze(1)) | (tokens >= run.stop.unsqueeze(1))
    return torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, HIDDEN)


# -- attention over a part of the tokens -------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, form: ScoreForm, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention to these tokens alone, `[rows, query_heads, queries, head_dim]`, and ln(sum of exp(score))
    `[rows, query_heads, queries]`."""
    if q.device.type == "cpu" and form is PLAIN and q.shape[3] == v.shape[3]:
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
