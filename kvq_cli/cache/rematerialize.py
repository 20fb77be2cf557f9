"""A stream of layer inputs, read as keys or as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed


@dataclass(frozen=True)
class Rematerialize:
    """How keys before RoPE, or values, are made of what a stream keeps.

    numbers: `[rows, 1, tokens, rank]` -> `[rows, kv_heads, tokens, head_dim]`.
    sums: where that is linear, weighted sums over tokens of what is kept, `[rows, kv_heads, queries, rank]` with
    weights that add up to 1 -> the same sums of values, `[..., head_dim]`: much less work than to make every value.
    """

    numbers: Callable[[Tensor], Tensor]
    sums: Callable[[Tensor], Tensor] | None = None


class RematerializedStream:
    """What attention reads of `stream`: the same tokens in the same pieces, as keys or as values. Stores nothing."""

    def __init__(self, stream: Stream, rematerialize: Rematerialize) -> None:
        self._stream, self._rematerialize = stream, rematerialize

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def exact(self, *where) -> Iterator[tuple[int, int, Tensor]]:
        """As `Stream.exact`."""
        for first, last, x in self._stream.exact(*where):
            if last > first:
                yield first, last, self._rematerialize.numbers(x)

    def coder(self, rows: slice) -> Codec:
        """What decodes the packed tokens of `rows`."""
        return _RematerializingCodec(self._stream.coder(rows), self._rematerialize.numbers)

    def read(self, row: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As `Stream.read`."""
        return self._rematerialize.numbers(self._stream.read(row, dtype)).to(dtype)


class _RematerializingCodec(Codec):
    def __init__(self, codec: Codec, rematerialize: Callable[[Tensor], Tensor]) -> None:
        self._codec, self._rematerialize = codec, rematerialize
        self.block_tokens, self.nominal_bits = codec.block_tokens, codec.nominal_bits

    def _encode(self, x: Tensor) -> Packed:
        raise NotImplementedError("what is kept is the layer input")

    def constants(self) -> Mapping[str, Tensor]:
        return self._codec.constants()

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._rematerialize(self._codec.decode(packed, dtype)).to(dtype)
