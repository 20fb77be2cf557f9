"""A stream whose tokens lie in pages: packed tokens in vLLM's blocks, exact ones in blocks of their own.

One object serves all sequences of a layer, one after another: `open` points it at a sequence's blocks. Packed token j
of a sequence (token sinks + j) has place j + `shift` in its blocks; see `shifts`. What a block holds then depends on
the tokens before its end alone, so blocks can be shared between sequences with a common prefix, and a sequence that
packs tokens of a shared block writes the bytes that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Packed, Part
from kvq_cli.methods.base import ModelShape, StreamPlan
from kvq_cli.vllm.batch import BlockTable
from kvq_cli.vllm.layout import PagePart, codec_of
from kvq_cli.vllm.step import Places, Step


def shifts(keys: StreamPlan, values: StreamPlan) -> tuple[int, int]:
    """Places of the first packed key and value in a sequence's blocks: the sinks, rounded up to whole packing blocks.

    Kernels want one place for both, of whole blocks of both. Where that could exceed the blocks of a sequence's tokens
    (a stream that packs in smaller steps, with fewer recent tokens than it is moved), each has its own.
    """
    unit = math.lcm(*(codec_of(stream).block_tokens for stream in (keys, values)))
    both = max(_rounded(stream.window.sinks, unit) for stream in (keys, values))
    for stream in (keys, values):
        window = stream.window
        if window.flush % unit and window.recent < both - window.sinks:
            return tuple(_rounded(each.window.sinks, codec_of(each).block_tokens) for each in (keys, values))  # type: ignore[return-value]
    return both, both


def _rounded(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


class PagedStream(Stream):
    """Keys or values of one layer in pages of `block_size` tokens; `parts` as in `PageLayout`.

    exact_size: tokens of a block in full precision; 0: there are none. shift: see `shifts`.
    """

    def __init__(
        self,
        plan: StreamPlan,
        shape: ModelShape,
        parts: dict[str, PagePart],
        block_size: int,
        exact_size: int,
        shift: int,
    ) -> None:
        super().__init__(plan)
        self._parts, self.block_size, self._exact_size, self.shift = parts, block_size, exact_size, shift
        #: Gives attention the heads, channels and dtype; no token is in it.
        self.ring = torch.empty(1, shape.kv_heads, 0, shape.head_dim, dtype=shape.torch_dtype)
        self._views: dict[str, Tensor] = {}
        self._exact_pages = torch.empty(0)
        self._table = self._exact_table = BlockTable(torch.empty(0))

    def bind(self, pages: Sequence[Tensor], exact_pages: Tensor | None) -> None:
        """Read and write `pages`, of all layers, uint8 `[pages, bytes]` each, and `exact_pages` `[pages, exact_size,
        heads, head_dim]`."""
        self._views = {name: part.view(pages, self.block_size) for name, part in self._parts.items()}
        if exact_pages is not None:
            self._exact_pages = exact_pages

    def open(self, tokens: int, table: BlockTable, exact_table: BlockTable | None) -> None:
        """Continue the sequence of `tokens` tokens with these pages."""
        self.lengths, self._final, self._table = [tokens], [self.window.packed(tokens)], table
        if exact_table is not None:
            self._exact_table = exact_table

    @property
    def parts(self) -> dict[str, Part]:
        """The packed parts in all pages, `[pages, heads, block_size // unit, ...]`."""
        return {name: Part(self._views[name], part.unit) for name, part in self._parts.items()}

    # -- packed tokens -------------------------------------------------------------------------------------------

    def _write(self, span: RowSpan, packed: Packed, reserve: int) -> None:
        first = self.window.packed(span.past) + self.shift
        for name, part in packed.parts.items():
            self._by_head(name)[:, *self._places(first, first + packed.tokens, part.unit)] = part.tensor[0]

    def _by_head(self, name: str) -> Tensor:
        """The part in all pages, `[heads, pages, block_size // unit, ...]`."""
        return self._views[name].transpose(0, 1)

    def _places(self, first: int, last: int, unit: int) -> Places:
        """Of the entries of tokens [first, last) of the sequence."""
        return self._table.places(first // unit, last // unit, self.block_size // unit)

    def _tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield first, last, self._packed(first + self.shift, last + self.shift)

    def _packed(self, first: int, last: int) -> Packed:
        """The places [first, last) of the sequence."""
        parts = {}
        for name, part in self._parts.items():
            entries = self._by_head(name)[:, *self._places(first, last, part.unit)]
            parts[name] = Part(entries.unsqueeze(0), part.unit)
        return Packed(last - first, parts)

    def append_each(self, x: Tensor, step: Step) -> None:
        """Add a token to each of several sequences without reading anything back, as a CUDA graph needs it.

        x: `[rows, heads, head_dim]`. Rows that pack nothing encode nothing, where the host knows which these are.
        """
        if step.exact_blocks is not None:
            self._exact_pages[step.new_places(self._exact_size)] = x
        window, packing = self.window, step.packing(self.window)
        if packing is None:
            return
        if step.exact_blocks is None:
            run = (x if packing.chosen is None else x[packing.chosen]).unsqueeze(2)
        else:
            run = self._read(packing, packing.flush_places(window, self._exact_size, len(self._exact_pages)))
        packed = self.coder(slice(0, len(run))).encode(run)
        for name, part in packed.parts.items():
            units, count = self.block_size // part.unit, part.tensor.shape[2]
            page, slot = packing.packed_places(window, self.shift, units, part.unit, count)
            self._views[name][page, :, slot] = part.tensor.transpose(1, 2)

    # -- exact tokens --------------------------------------------------------------------------------------------

    def _append(self, span: RowSpan, x: Tensor, reserve: int, packed: Packed | None = None) -> None:
        # Other sequences with this prefix may start where these tokens are still exact: all of them are kept, until
        # vLLM frees their blocks.
        if self._exact_size:
            self._exact_pages[self._exact_table.places(span.past, span.tokens, self._exact_size)] = x[0].transpose(0, 1)
        self._put(span, x, reserve, packed)

    def _recent(self, rows: slice, start: int, stop: int) -> list[Tensor]:
        return [self._exact(start, stop)] if start < stop else []

    def _exact(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) in full precision, `[1, heads, stop - start, head_dim]`."""
        numbers = self._exact_pages[self._exact_table.places(start, stop, self._exact_size)]
        return numbers.transpose(0, 1).unsqueeze(0)

    def exact_of(self, step: Step) -> tuple[Tensor | None, Tensor]:
        """(sinks, ring) of the rows as `Stream` holds them, `[rows, heads, tokens, head_dim]`. Tokens that are packed,
        or not there, are any numbers."""
        sinks, pages = self.window.sinks, (self._exact_size, len(self._exact_pages))
        first = self._read(step, step.sink_places(sinks, *pages)) if sinks else None
        return first, self._read(step, step.ring_places(sinks, max(self.ring_size, 1), *pages))

    def _read(self, step: Step, places: Places) -> Tensor:
        """Exact tokens at `[rows, 1, n]`: `[rows, heads, n, head_dim]`."""
        page, slot = places
        return self._exact_pages[page, slot, step.heads(self._exact_pages.shape[2])]

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = 1 << 30
    ) -> Iterator[tuple[int, int, Tensor]]:
        first, last = self.split(tokens)
        for begin, end in ((start, min(first, stop)), (max(start, last), min(tokens, stop))):
            for cut in range(begin, end, size):
                upto = min(cut + size, end)
                yield cut, upto, self._exact(cut, upto)
