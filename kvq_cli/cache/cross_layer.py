"""X^ on its way from layer to layer: what the layers of a cross-layer method need of the layers below, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_cli.cache.rows import Forward
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed, Part
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import CrossLayer, LayerPlan, StreamPlan


class CrossLayerSum:
    """X^_i = X^_{i-1} + d_i U^T of all packed tokens, one for a cache; its layers take their turns in order.

    Only d_i = Q((X_i - X^_{i-1}) U) is stored. All layers of the sum have the same windows, so that a block of tokens
    is packed in all of them in the same pass, and X^_{i-1} of that block is there when d_i is made. X^ lives from the
    first layer's turn to the last one's. U = 1 where X itself is kept.
    """

    def __init__(self) -> None:
        self._held: list[Tensor | Packed] = []  # X^ by row group, [rows, 1, packed tokens, hidden_size]
        self._sums: list[Tensor] = []  # the same while a layer has its turn
        #: Bytes that X^ took at most between two layers.
        self.peak = 0

    def enter(self, plan: LayerPlan, stream: DifferenceStream, x: Tensor, forward: Forward) -> None:
        """A layer's turn begins, with its latents `x` `[batch, 1, columns, rank]`: what is packed from now on is the
        difference to X^_{i-1} U."""
        stream.references = {}
        if plan.cross_layer.first:
            self._sums = []
            return
        if len(self._held) != len(forward.row_groups):
            raise KvqError("the layers of a cross-layer cache must take in their tokens in order")
        self._sums = [_numbers(plan.cross_layer, held, x.dtype) for held in self._held]
        for group, total in zip(forward.row_groups, self._sums, strict=True):
            stream.references[group.rows.start] = _down(plan.keys, total)

    def leave(self, plan: LayerPlan, stream: DifferenceStream, forward: Forward) -> None:
        """The turn ends, with the stream's tokens in it: all packed ones are read back, for the layer's attention, and
        X^_i goes to the next layer."""
        part, held = plan.cross_layer, []
        for number, group in enumerate(forward.row_groups):
            difference = stream.differences(group.rows, group.tokens, stream.ring.dtype)
            reference = stream.references.get(group.rows.start)
            latents = difference if reference is None else reference + difference
            stream.read_back[group.rows.start] = latents
            if not part.last:
                down = plan.keys.down
                total = latents if down is None else self._sums[number] + difference @ down.T
                held.append(part.accumulator.encode(total) if part.accumulator and total.shape[2] else total)
        stream.references, self._sums, self._held = {}, [], held
        self.peak = max(self.peak, sum(_nbytes(one) for one in held))


class DifferenceStream(Stream):
    """A stream that packs differences to numbers that only the layers below know, and only during a pass.

    references: first row of a group -> `[rows, 1, packed tokens, rank]`, what its packed tokens are compared with.
    read_back:  the same places -> what the packed tokens are. While it is there, the stream is read as it says.
    """

    def reset(self) -> None:
        super().reset()
        self.references: dict[int, Tensor] = {}
        self.close()

    def close(self) -> None:
        """The layer's attention is done."""
        self.read_back: dict[int, Tensor] = {}

    def coder(self, rows: slice) -> Codec:
        """While a layer has its turn, what encodes the tokens to come; after it, what reads them."""
        if rows.start in self.references:
            done = self.window.packed(self.lengths[rows.start])
            return _DifferenceCodec(self.codec, self.references[rows.start][:, :, done:])
        return _AS_IT_IS if rows.start in self.read_back else self.codec

    def packed(self, rows: slice, tokens: int, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """As `Stream.packed`."""
        if rows.start not in self.read_back:
            yield from super().packed(rows, tokens, start, stop, size)
            return
        sinks, end = self.split(tokens)
        for first in range(max(start, sinks), min(stop, end), size):
            last = min(first + size, stop, end)
            held = self.read_back[rows.start][:, :, first - sinks : last - sinks]
            yield first, last, Packed(last - first, {"raw": Part(held, 1)})

    def differences(self, rows: slice, tokens: int, dtype: torch.dtype) -> Tensor:
        """What is packed of rows of `tokens` tokens, `[rows, 1, packed tokens, rank]`."""
        start, stop = self.split(tokens)
        if start == stop:
            return self.ring.new_empty(rows.stop - rows.start, 1, 0, self.ring.shape[3])
        _, _, packed = next(super().packed(rows, tokens, start, stop, stop))
        return self.codec.decode(packed, dtype)


class _DifferenceCodec(Codec):
    """Encodes the difference to `reference`."""

    def __init__(self, codec: Codec, reference: Tensor) -> None:
        self._codec, self._reference, self.block_tokens = codec, reference, codec.block_tokens

    def _encode(self, x: Tensor) -> Packed:
        return self._codec.encode(x - self._reference)

    encode = _encode  # all at once: the reference is for all of it

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("differences are read by their stream")


_AS_IT_IS = IdentityCodec()


def _down(plan: StreamPlan, x: Tensor) -> Tensor:
    return x if plan.down is None else x @ plan.down


def _numbers(part: CrossLayer, held: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    return held if isinstance(held, Tensor) else part.accumulator.decode(held, dtype)


def _nbytes(held: Tensor | Packed) -> int:
    return held.nbytes if isinstance(held, Packed) else held.numel() * held.element_size()
