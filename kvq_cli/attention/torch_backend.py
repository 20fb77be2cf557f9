"""Attention over a compressed layer in plain PyTorch, a tile of tokens at a time, softmax in float32.

The rows of a `RowGroup` are computed together; every function below the public ones sees one group, whose rows all hold
the same number of tokens. Token i of a group has index i in its keys and in its values alike, although the two streams
may split differently into sinks, packed and recent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import TILE as ROTATION_TILE
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import RowGroup
from kvq_cli.cache.stream import StreamReader
from kvq_cli.codecs.base import Codec, Packed

#: Numbers decoded at a time for one query per row: about a core's cache.
DECODE_NUMBERS = 1 << 19
#: Tokens and queries of a tile of scores when there are many queries.
PREFILL_TILE = 512


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
            out[group.rows, :, group.pads :] = _prefill(q, k, v, context, group, tails).to(out.dtype)
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
        return torch.cat([q @ piece.numbers().transpose(2, 3) for piece in keys], dim=-1)
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
    out = weights[..., : values[0].last - start] @ values[0].numbers()
    for piece in values[1:]:
        out += weights[..., piece.first - start : piece.last - start] @ piece.numbers()
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
        return self.codec.decode(self.stored, torch.float32)[:, :, self.cut :]


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


# -- several queries per row -------------------------------------------------------------------------------------


@dataclass
class _Side:
    """Keys or values during a prefill: which queries see which tokens packed, and both forms of the numbers.

    boundary(n): the first token after the sinks that the last of n tokens sees in full precision.
    strip: tokens [strip_start, end) in full precision: those that were not packed before this pass.
    """

    stream: StreamReader
    group: RowGroup
    boundary: Callable[[int], int]
    strip: Tensor
    strip_start: int
    turn: Rotation | None

    def cuts(self) -> list[int]:
        """Tokens at which the storage changes; no tile goes across them."""
        prompt = self.stream.window.sinks + self.stream.prompt_tokens(self.group.rows)
        return [prompt, *self.stream.split(self.group.past), *self.stream.split(self.group.tokens)]

    def exact(self, first: int, last: int) -> Tensor | None:
        """Tokens of a tile in full precision, if they are."""
        if first >= self.strip_start:
            return self.strip[:, :, first - self.strip_start : last - self.strip_start]
        if first < self.stream.window.sinks:
            _, _, x = next(self.stream.exact(self.group.rows, self.group.tokens, first, last))
            return self._turned(x.float(), first)
        return None

    def packed(self, first: int, last: int) -> Tensor | None:
        """Tokens of a tile as decoded, if any query sees them so."""
        start, stop = self.stream.split(self.group.tokens)
        if first < start or first >= min(stop, self.boundary(self.group.tokens)):
            return None
        begin, _, packed = next(self.stream.packed(self.group.rows, self.group.tokens, first, last, stop))
        x = self.stream.coder(self.group.rows).decode(packed, torch.float32)[:, :, first - begin : last - begin]
        return self._turned(x, first)

    def _turned(self, x: Tensor, first: int) -> Tensor:
        if self.turn is None:
            return x
        return self.turn.at(x, first + self.group.offset)


def _side(
    stream: StreamReader, new: Tensor, tail: Tensor | None, group: RowGroup, turn: Rotation | None, compressed: bool
) -> _Side:
    """new: the keys or values of the pass. tail: those before it that were not yet packed."""
    window, start = stream.window, stream.split(group.past)[1]
    if tail is not None:
        tail = tail.float()
        if turn is not None:
            tail = turn.at(tail, start + group.offset)
        new = torch.cat([tail, new], dim=2)

    def boundary(tokens: int) -> int:
        return window.sinks + window.packed(tokens if compressed else group.past)

    return _Side(stream, group, boundary, new, start, turn)


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ForwardContext,
    group: RowGroup,
    tails: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """One group's queries (pads cut off), float32: online softmax over tiles of tokens, tiles of queries inside."""
    layer, form = context.layer, context.score_form
    turn = None if layer.plan.keys.source == "post_rope" else layer.rotation
    keys = _side(layer.key_stream, key, tails[0], group, turn, context.compressed)
    values = _side(layer.value_stream, value, tails[1], group, None, context.compressed)
    sides, heads, columns = (keys, values), key.shape[1], key.shape[2]
    q = (query * context.scaling).unflatten(1, (heads, -1))  # [rows, kv_heads, group, columns, head_dim]
    shape = q.shape[:-1]
    out, total = torch.zeros_like(q), q.new_zeros(*shape, 1)
    top = q.new_full((*shape, 1), -torch.inf)
    if form.sinks is not None:  # a logit that came before all tokens
        top, total = form.sink_logits(q).clone(), torch.ones_like(total)
    for first, last in _tiles(group.tokens, [*keys.cuts(), *values.cuts()], _first_seen(layer, group.past)):
        key_tile, value_tile = (_Numbers(side, side.exact(first, last), side.packed(first, last)) for side in sides)
        for begin in range(max(0, first - group.past) // PREFILL_TILE * PREFILL_TILE, columns, PREFILL_TILE):
            part = slice(begin, min(begin + PREFILL_TILE, columns))
            tile = _Tile(first, last, group.past + begin, group.past + part.stop, layer.sliding_window, q.device)
            state = _Softmax(out[:, :, :, part], total[:, :, :, part], top[:, :, :, part])
            _accumulate(q[:, :, :, part], state, tile, form, key_tile, value_tile)
    return (out / total).flatten(1, 2)


def _tiles(tokens: int, cuts: list[int], start: int) -> Iterator[tuple[int, int]]:
    """Tiles of [start, tokens), none longer than `PREFILL_TILE` or across one of `cuts`."""
    stops = sorted({min(max(cut, start), tokens) for cut in [*cuts, tokens]})
    for stop in stops:
        while start < stop:
            last = min(start + PREFILL_TILE, stop)
            yield start, last
            start = last


@dataclass
class _Tile:
    """Scores of tokens [first, last) for the queries of tokens [begin, end)."""

    first: int
    last: int
    begin: int
    end: int
    window: int | None
    device: torch.device

    def __post_init__(self) -> None:
        self.tokens = torch.arange(self.first, self.last, device=self.device)
        self.queries = torch.arange(self.begin, self.end, device=self.device).unsqueeze(1)

    def hidden(self) -> Tensor | None:
        """True where a query does not see a token; None where all see all."""
        causal = self.last - 1 <= self.begin
        if causal and (self.window is None or self.first > self.end - 1 - self.window):
            return None
        hidden = self.tokens > self.queries
        return hidden if self.window is None else hidden | (self.tokens <= self.queries - self.window)

    def seen_packed(self, side: _Side) -> Tensor | bool:
        """True where a query sees a token packed; one bool where it is the same for the whole tile."""
        if self.last <= side.boundary(self.begin + 1):
            return True
        if self.first >= side.boundary(self.end):
            return False
        edges = torch.tensor([side.boundary(n + 1) for n in range(self.begin, self.end)], device=self.device)
        return self.tokens < edges.unsqueeze(1)


class _Softmax(NamedTuple):
    """The running state of an online softmax, updated in place: unnormalized outputs, sums and maxima of the scores."""

    out: Tensor
    total: Tensor
    top: Tensor


@dataclass
class _Numbers:
    """Keys or values of a tile: in full precision, as decoded, or both where queries see them differently."""

    side: _Side
    exact: Tensor | None
    packed: Tensor | None

    def seen_packed(self, tile: _Tile) -> Tensor | bool:
        """Which queries see which tokens packed: all (True), none (False), or as a mask says."""
        if self.packed is None:
            return False
        return True if self.exact is None else tile.seen_packed(self.side)


def _accumulate(q: Tensor, state: _Softmax, tile: _Tile, form: ScoreForm, keys: _Numbers, values: _Numbers) -> None:
    """One step of the online softmax: the state of a tile's queries takes in its tokens."""
    scores = form.capped(_mixed_scores(q, keys, keys.seen_packed(tile)))
    hidden = tile.hidden()
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    peak = torch.maximum(state.top, scores.amax(dim=-1, keepdim=True))
    base = peak.masked_fill(peak == -torch.inf, 0)  # a query that has seen no token yet
    weights = scores.sub_(base).exp_()
    shrink = (state.top - base).exp_()
    state.total.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
    state.out.mul_(shrink).add_(_mixed_sum(weights, values, values.seen_packed(tile)))
    state.top.copy_(peak)


def _mixed_scores(q: Tensor, keys: _Numbers, packed: Tensor | bool) -> Tensor:
    """Scores of a tile; `packed`: which are of decoded keys."""
    if packed is False:
        return _scores(q, keys.exact)
    if packed is True:
        return _scores(q, keys.packed)
    return torch.where(packed, _scores(q, keys.packed), _scores(q, keys.exact))


def _scores(q: Tensor, keys: Tensor | None) -> Tensor:
    if keys is None:
        raise ValueError("a tile has no numbers of this kind")
    return q @ keys.unsqueeze(2).transpose(3, 4)


def _mixed_sum(weights: Tensor, values: _Numbers, packed: Tensor | bool) -> Tensor:
    """Weighted sums of the values of a tile; `packed`: which are decoded ones."""
    if packed is False:
        return _sum(weights, values.exact)
    if packed is True:
        return _sum(weights, values.packed)
    return _sum(weights * packed, values.packed) + _sum(weights.masked_fill(packed, 0), values.exact)


def _sum(weights: Tensor, values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("a tile has no numbers of this kind")
    return weights @ values.unsqueeze(2)
