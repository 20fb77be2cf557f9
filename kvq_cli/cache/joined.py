"""Codes of all layers together: packed when all layers have the tokens, held once, and read by each layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Packed, concatenate
from kvq_cli.codecs.joined_layers import JoinedLayersCodec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import StreamPlan

#: Components that are quantized at a time.
_TILE = 1 << 22


class JoinedLayers:
    """The streams of the keys, or of the values, of all layers of one cache, in order. The first holds the codes.

    Tokens that a pass packs and that came before it are packed at the turn of its first layer: every layer then reads
    them as packed. Tokens of the pass itself are packed at the turn of the last; until then, their components are added
    up, layer by layer. Only a pass over more tokens than `recent` packs any of its own.
    """

    def __init__(self) -> None:
        self._streams: list[JoinedStream] = []
        self._sums: dict[int, Tensor] = {}  # by first row of a span
        #: The most bytes of components that waited for layers.
        self.peak = 0

    def add(self, stream: JoinedStream) -> bool:
        """Add the next layer's; returns whether it holds the codes."""
        self._streams.append(stream)
        return len(self._streams) == 1

    def clear(self) -> None:
        """Forget what waits for layers."""
        self._sums = {}

    def tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """The codes of packed tokens [start, stop); see `PackedStore.tiles`."""
        return self._streams[0].store.tiles(rows, start, stop, size)

    def pack(self, stream: JoinedStream, span: RowSpan, x: Tensor, reserve: int) -> None:
        """The turn of a layer's stream, before it takes in `x`, the new tokens of `span`; `reserve` as in
        `PackedStore.write`."""
        first, last = self._streams[0], self._streams[-1]
        window = stream.window
        packed = window.packed(span.tokens)
        if packed == window.packed(span.past):
            return
        if window.sinks + packed <= span.past:
            if stream is first:
                for each in self._streams:
                    self._add(each, span, x)
                self._write(span, reserve)
            return
        if stream is not first and span.rows.start not in self._sums:
            raise KvqError("the layers of a cache that joins them must take in their tokens in order")
        self._add(stream, span, x)
        if stream is last:
            self._write(span, reserve)

    def _add(self, stream: JoinedStream, span: RowSpan, x: Tensor) -> None:
        """Add what a layer contributes to the components of the tokens to pack."""
        block = stream.to_pack(span, x)
        if block is None:
            raise ValueError("no tokens are packed")
        part = stream.codec.project(block)
        before = self._sums.get(span.rows.start)
        self._sums[span.rows.start] = part if before is None else before.add_(part)
        self.peak = max(self.peak, sum(z.nbytes for z in self._sums.values()))

    def _write(self, span: RowSpan, reserve: int) -> None:
        z, holder = self._sums.pop(span.rows.start), self._streams[0]
        step = max(1, _TILE // (z.shape[0] * z.shape[3]))
        packed = concatenate([holder.codec.quantize(tile) for tile in z.split(step, dim=2)])
        holder.store.write(span.rows, len(holder.lengths), holder.window.packed(span.past), packed, reserve)


class JoinedStream(Stream):
    """A layer's stream of `JoinedLayers`: its sinks and recent tokens, and its view of the codes."""

    codec: JoinedLayersCodec

    def __init__(self, plan: StreamPlan, layers: JoinedLayers) -> None:
        self._layers = layers
        self._holds = layers.add(self)
        super().__init__(plan)

    def reset(self) -> None:
        super().reset()
        self._layers.clear()

    @property
    def _joins_encoding(self) -> bool:
        return False

    def _put(self, span: RowSpan, x: Tensor, reserve: int, packed: Packed | None) -> None:
        self._layers.pack(self, span, x, reserve)

    def _stored(self, rows: slice, tokens: int) -> int:
        return super()._stored(rows, tokens) if self._holds else 0

    def _tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        return self._layers.tiles(rows, start, stop, size)

    def can_capture(self, past: int) -> bool:
        return False  # codes are packed at the turn of another layer
