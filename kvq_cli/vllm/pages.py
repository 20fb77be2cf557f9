"""A stream whose tokens lie in pages: packed tokens in vLLM's blocks, exact ones in blocks of their own.

One object serves all sequences of a layer, one after another: `open` points it at a sequence's blocks. Packed token j
of a sequence (token sinks + j) has place j + s in its blocks, where s is `sinks` rounded up to whole packing blocks.
What a block holds then depends on the tokens before its end alone, so blocks can be shared between sequences with a
common prefix, and a sequence that packs tokens of a shared block writes the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_cli.cache.rows import RowGroup
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Packed, Part
from kvq_cli.methods.base import ModelShape, StreamPlan
from kvq_cli.vllm.layout import PagePart


class PagedStream(Stream):
    """Keys or values of one layer in pages of `block_size` tokens; `parts` as in `PageLayout`.

    exact_size: tokens of a block in full precision; 0: there are none.
    """

    def __init__(
        self, plan: StreamPlan, shape: ModelShape, parts: dict[str, PagePart], block_size: int, exact_size: int
    ) -> None:
        super().__init__(plan)
        self._parts, self._block_size, self._exact_size = parts, block_size, exact_size
        unit = self.codec.block_tokens
        self._shift = -(-self.window.sinks // unit) * unit
        #: Gives attention the heads, channels and dtype; no token is in it.
        self.ring = torch.empty(1, shape.kv_heads, 0, shape.head_dim, dtype=shape.dtype)
        self._views: dict[str, Tensor] = {}
        self._exact_pages = self._blocks = self._exact_blocks = torch.empty(0)

    def bind(self, pages: Tensor, exact_pages: Tensor | None) -> None:
        """Read and write `pages`, uint8 `[pages, bytes]`, and `exact_pages` `[pages, exact_size, heads, head_dim]`."""
        self._views = {name: part.view(pages, self._block_size) for name, part in self._parts.items()}
        if exact_pages is not None:
            self._exact_pages = exact_pages

    def open(self, tokens: int, blocks: Tensor, exact_blocks: Tensor | None) -> None:
        """Continue the sequence of `tokens` tokens whose pages are `blocks` and `exact_blocks`, int64, in order; blocks
        of exact tokens that were freed may be anything."""
        self.lengths, self._blocks = [tokens], blocks
        if exact_blocks is not None:
            self._exact_blocks = exact_blocks

    # -- packed tokens -------------------------------------------------------------------------------------------

    def _write(self, group: RowGroup, packed: Packed, reserve: int) -> None:
        start = self.window.packed(group.past) + self._shift
        size, done = self._block_size, 0
        while done < packed.tokens:
            page, slot = divmod(start + done, size)
            count = min(packed.tokens - done, size - slot)
            block = self._blocks[page]
            for name, part in packed.parts.items():
                cut = part.tensor[0, :, done // part.unit : (done + count) // part.unit]
                self._views[name][block, :, slot // part.unit : (slot + count) // part.unit] = cut
            done += count

    def _tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield first, last, self._packed(first + self._shift, last + self._shift)

    def _packed(self, first: int, last: int) -> Packed:
        """The places [first, last) of the sequence."""
        start = first // self._block_size
        blocks = self._blocks[start : -(-last // self._block_size)]
        first, last = first - start * self._block_size, last - start * self._block_size
        parts = {}
        for name, part in self._parts.items():
            pages = self._views[name].index_select(0, blocks).transpose(0, 1).flatten(1, 2)
            parts[name] = Part(pages[:, first // part.unit : last // part.unit].unsqueeze(0), part.unit)
        return Packed(last - first, parts)

    # -- exact tokens --------------------------------------------------------------------------------------------

    def _append(self, group: RowGroup, x: Tensor, reserve: int) -> None:
        # Other sequences with this prefix may start where these tokens are still exact: all of them are kept, until
        # vLLM frees their blocks.
        if self._exact_size:
            at = torch.arange(group.past, group.tokens, device=x.device)
            self._exact_pages[self._exact_blocks[at // self._exact_size], at % self._exact_size] = x[0].transpose(0, 1)
        self._pack(group, self.to_pack(group, x), reserve)

    def _recent(self, rows: slice, start: int, stop: int) -> list[Tensor]:
        return [self._exact(start, stop)] if start < stop else []

    def _exact(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) in full precision, `[1, heads, stop - start, head_dim]`."""
        at = torch.arange(start, stop, device=self._exact_pages.device)
        numbers = self._exact_pages[self._exact_blocks[at // self._exact_size], at % self._exact_size]
        return numbers.transpose(0, 1).unsqueeze(0)

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = 1 << 30
    ) -> Iterator[tuple[int, int, Tensor]]:
        first, last = self.split(tokens)
        for begin, end in ((start, min(first, stop)), (max(start, last), min(tokens, stop))):
            for cut in range(begin, end, size):
                upto = min(cut + size, end)
                yield cut, upto, self._exact(cut, upto)
