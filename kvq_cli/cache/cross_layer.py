"""The cross-layer sum X^ of XQuant-CL: accumulated from layer to layer during a forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_cli.cache.rows import Forward
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed, Part
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import Layout
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import CrossLayer, StreamPlan
from kvq_cli.upcast import linear


class CrossLayerSum:
    """X^_i = X^_{i-1} + d_i U^T over all packed tokens, one sum per cache, updated layer by layer.

    Only d_i = Q((X_i - X^_{i-1}) U) is stored. All layers have the same windows, so that they pack a block of tokens in
    the same pass, when X^_{i-1} of that block is available. X^ exists from the first layer to the last one of a pass.
    U = 1 where X itself is cached.
    """

    def __init__(self) -> None:
        self._accumulators: list[Tensor | Packed] = []  # X^ by row spans, [rows, 1, packed tokens, hidden_size]
        self._sums: list[Tensor] = []  # the same, decoded, while a layer has its turn
        #: The most bytes that a layer's turn held: X^ of the layer below, packed and decoded, and its latents; X^ of
        #: this layer and the latents that its attention reads. Results of single operations are left out.
        self.peak = 0

    def enter(self, part: CrossLayer, stream: DifferenceStream, forward: Forward, dtype: torch.dtype) -> None:
        """A layer's turn begins: the differences to X^_{i-1} U are packed from now on. dtype: of the layer input."""
        stream.sums_below = {}
        if part.first:
            self._sums = []
            return
        if len(self._accumulators) != len(forward.row_spans):
            raise KvqError("the layers of a cross-layer cache must take in their tokens in order")
        self._sums = [_decoded(part, accumulator, dtype) for accumulator in self._accumulators]
        for span, total in zip(forward.row_spans, self._sums, strict=True):
            stream.sums_below[span.rows.start] = _down(stream.plan, total)

    def leave(self, part: CrossLayer, stream: DifferenceStream, forward: Forward) -> None:
        """The turn ends, with the stream's tokens in it: all packed ones are read back, for the layer's attention, and
        X^_i goes to the next layer."""
        accumulators: list[Tensor | Packed] = []
        for number, span in enumerate(forward.row_spans):
            difference = stream.differences(span.rows, span.tokens, stream.ring.dtype)
            below = stream.sums_below.get(span.rows.start)
            latents = difference if below is None else below + difference
            stream.read_back[span.rows.start] = latents
            if not part.last:
                down = stream.plan.down
                total = latents if down is None else self._sums[number] + linear(difference, down)
                if part.accumulator is None or not total.shape[2]:
                    accumulators.append(total)
                else:
                    accumulators.append(part.accumulator.encode(total))
        held = [
            *self._accumulators,
            *self._sums,
            *stream.sums_below.values(),
            *stream.read_back.values(),
            *accumulators,
        ]
        self.peak = max(self.peak, sum({id(each): each.nbytes for each in held}.values()))
        stream.sums_below, self._sums, self._accumulators = {}, [], accumulators


class DifferenceStream(Stream):
    """A stream that packs differences to numbers that only the layers below know, and only during a pass.

    sums_below: first row of a span -> the sum of the layers below, `[rows, 1, packed tokens, rank]`.
    read_back:  first row of a span -> the sums of both. While it is there, the stream is read as it says.
    """

    def reset(self) -> None:
        super().reset()
        self.sums_below: dict[int, Tensor] = {}
        self.close()

    def close(self) -> None:
        """The layer's attention is done: forget what it read."""
        self.read_back: dict[int, Tensor] = {}

    @property
    def joins_rows(self) -> bool:
        return False  # sums are by span

    def coder(self, rows: slice) -> Codec:
        """While a layer has its turn, the codec that encodes the tokens to come; after it, the one that decodes."""
        if rows.start in self.sums_below:
            packed = self.window.packed(self.lengths[rows.start])
            return _DifferenceCodec(super().coder(rows), self.sums_below[rows.start][:, :, packed:])
        return _IDENTITY if rows.start in self.read_back else super().coder(rows)

    def packed(self, rows: slice, tokens: int, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """As `Stream.packed`."""
        if rows.start not in self.read_back:
            yield from super().packed(rows, tokens, start, stop, size)
            return
        sinks, end = self.split(tokens)
        for first in range(max(start, sinks), min(stop, end), size):
            last = min(first + size, stop, end)
            numbers = self.read_back[rows.start][:, :, first - sinks : last - sinks]
            yield first, last, Packed(last - first, {"raw": Part(numbers, 1)})

    def differences(self, rows: slice, tokens: int, dtype: torch.dtype) -> Tensor:
        """The packed differences of rows of `tokens` tokens, `[rows, 1, packed tokens, rank]`."""
        start, stop = self.split(tokens)
        if start == stop:
            return self.ring.new_empty(rows.stop - rows.start, 1, 0, self.ring.shape[3])
        _, _, packed = next(super().packed(rows, tokens, start, stop, stop))
        return super().coder(rows).decode(packed, dtype)


class _DifferenceCodec(Codec):
    """Encodes the difference to `below`, the sum of the layers below, by `base`."""

    def __init__(self, base: Codec, below: Tensor) -> None:
        self._base, self._below, self.block_tokens = base, below, base.block_tokens

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self._base.layout(heads, dim, dtype)

    def _encode(self, x: Tensor) -> Packed:
        return self._base.encode(x - self._below)

    encode = _encode  # all at once: the sum is that of all of it

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("differences are read by their stream")


_IDENTITY = IdentityCodec()


def _down(plan: StreamPlan, x: Tensor) -> Tensor:
    return x if plan.down is None else linear(x, plan.down.T)


def _decoded(part: CrossLayer, accumulator: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    if isinstance(accumulator, Tensor):
        return accumulator
    if part.accumulator is None:
        raise KvqError("the sum over layers was packed by a layer of another plan")
    return part.accumulator.decode(accumulator, dtype)
