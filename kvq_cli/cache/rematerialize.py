"""Keys or values rematerialized from a stream of layer inputs when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.layout import Layout
from kvq_cli.methods.window import Window


@dataclass(frozen=True)
class Rematerialize:
    """How keys before RoPE, or values, are computed from the layer inputs or latents of a stream.

    numbers: `[rows, 1, tokens, rank]` -> `[rows, kv_heads, tokens, head_dim]`.
    sums:    where that is linear: weighted sums over the stream's tokens, `[rows, kv_heads, queries, rank]`, weights
             adding up to 1 -> the same sums of values, `[..., head_dim]`; cheaper than computing every value.
    """

    numbers: Callable[[Tensor], Tensor]
    sums: Callable[[Tensor], Tensor] | None = None


class RematerializedStream:
    """Reads the tokens of `stream` as keys or values; see `StreamReader`. Stores nothing."""

    def __init__(self, stream: Stream, rematerialize: Rematerialize) -> None:
        self._stream, self.numbers = stream, rematerialize.numbers

    @property
    def window(self) -> Window:
        return self._stream.window

    @property
    def ring(self) -> Tensor:
        return self._stream.ring

    @property
    def lengths(self) -> list[int]:
        return self._stream.lengths

    @property
    def packed_tokens(self) -> int:
        return self._stream.packed_tokens

    def prompt_tokens(self, rows: slice) -> int:
        return self._stream.prompt_tokens(rows)

    def split(self, tokens: int) -> tuple[int, int]:
        return self._stream.split(tokens)

    @property
    def joins_rows(self) -> bool:
        return self._stream.joins_rows

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = 1 << 30
    ) -> Iterator[tuple[int, int, Tensor]]:
        """As `Stream.exact`; not views."""
        for first, last, x in self._stream.exact(rows, tokens, start, stop, size):
            if last > first:
                yield first, last, self.numbers(x)

    def packed(self, rows: slice, tokens: int, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """As `Stream.packed`: layer inputs, which `coder` decodes to keys or values."""
        return self._stream.packed(rows, tokens, start, stop, size)

    def coder(self, rows: slice) -> Codec:
        """The codec that decodes the packed tokens of `rows` to keys or values."""
        return _RematerializingCodec(self._stream.coder(rows), self.numbers)

    def read(self, row: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As `Stream.read`."""
        return self.numbers(self._stream.read(row, dtype)).to(dtype)


class _RematerializingCodec(Codec):
    """Decodes with `base`, then computes keys or values."""

    def __init__(self, base: Codec, numbers: Callable[[Tensor], Tensor]) -> None:
        self._base, self._numbers = base, numbers
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self._base.layout(heads, dim, dtype)

    def _encode(self, x: Tensor) -> Packed:
        raise NotImplementedError("keys and values are not stored: the layer input is")

    def constants(self) -> Mapping[str, Tensor]:
        return self._base.constants()

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._numbers(self._base.decode(packed, dtype)).to(dtype)
