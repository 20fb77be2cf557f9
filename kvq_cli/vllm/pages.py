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
from kvq_cli.vllm.layout import PagePart, codec_of


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
        self._exact_pages = self._blocks = self._exact_blocks = torch.empty(0)

    def bind(self, pages: Sequence[Tensor], exact_pages: Tensor | None) -> None:
        """Read and write `pages`, of all layers, uint8 `[pages, bytes]` each, and `exact_pages` `[pages, exact_size,
        heads, head_dim]`."""
        self._views = {name: part.view(pages, self.block_size) for name, part in self._parts.items()}
        if exact_pages is not None:
            self._exact_pages = exact_pages

    def open(self, tokens: int, blocks: Tensor, exact_blocks: Tensor | None) -> None:
        """Continue the sequence of `tokens` tokens whose pages are `blocks` and `exact_blocks`, int64, in order; blocks
        of exact tokens that were freed may be anything."""
        self.lengths, self._blocks = [tokens], blocks
        if exact_blocks is not None:
            self._exact_blocks = exact_blocks

    @property
    def parts(self) -> dict[str, Part]:
        """The packed parts in all pages, `[pages, heads, block_size // unit, ...]`."""
        return {name: Part(self._views[name], part.unit) for name, part in self._parts.items()}

    # -- packed tokens -------------------------------------------------------------------------------------------

    def _write(self, span: RowSpan, packed: Packed, reserve: int) -> None:
        start = self.window.packed(span.past) + self.shift
        size, done = self.block_size, 0
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
            yield first, last, self._packed(first + self.shift, last + self.shift)

    def _packed(self, first: int, last: int) -> Packed:
        """The places [first, last) of the sequence."""
        start = first // self.block_size
        blocks = self._blocks[start : -(-last // self.block_size)]
        first, last = first - start * self.block_size, last - start * self.block_size
        parts = {}
        for name, part in self._parts.items():
            pages = self._views[name].index_select(0, blocks).transpose(0, 1).flatten(1, 2)
            parts[name] = Part(pages[:, first // part.unit : last // part.unit].unsqueeze(0), part.unit)
        return Packed(last - first, parts)

    def append_each(self, x: Tensor, lengths: Tensor, blocks: Tensor, exact_blocks: Tensor | None) -> None:
        """Add a token to each of several sequences without reading anything back, as a CUDA graph needs it.

        x: `[rows, heads, head_dim]`. lengths: int32 `[rows]`, tokens with the new one; 0: no sequence. blocks,
        exact_blocks: `[rows, blocks]` integers. Every row encodes the tokens that it would pack next; those that are
        not due, and rows without a sequence, go to page 0, which vLLM leaves to no sequence.
        """
        window, lengths = self.window, lengths.long()
        before, after = self.packed_of(lengths - 1), self.packed_of(lengths)
        if exact_blocks is None:
            packed = self.coder(slice(0, len(x))).encode(x.unsqueeze(2))
        else:
            at = (lengths - 1).clamp_(min=0)
            page = exact_blocks.gather(1, (at // self._exact_size)[:, None]).squeeze(1).long()
            self._exact_pages[page, at % self._exact_size] = x
            run = window.sinks + before[:, None] + torch.arange(window.flush, device=x.device)
            packed = self.coder(slice(0, len(x))).encode(self._gathered(run, exact_blocks))
        due = (after > before)[:, None]
        for name, part in packed.parts.items():
            units = self.block_size // part.unit
            place = ((before + self.shift) // part.unit)[:, None] + torch.arange(part.tensor.shape[2], device=x.device)
            page = blocks.gather(1, (place // units).clamp_(max=blocks.shape[1] - 1)).masked_fill_(~due, 0)
            self._views[name][page.long(), :, place % units] = part.tensor.transpose(1, 2)

    def packed_of(self, lengths: Tensor) -> Tensor:
        """`Window.packed` of each length."""
        window = self.window
        count = (lengths - window.sinks - window.recent).clamp(min=0)
        return count.div_(window.flush, rounding_mode="floor").mul_(window.flush)

    # -- exact tokens --------------------------------------------------------------------------------------------

    def _append(self, span: RowSpan, x: Tensor, reserve: int, packed: Packed | None = None) -> None:
        # Other sequences with this prefix may start where these tokens are still exact: all of them are kept, until
        # vLLM frees their blocks.
        if self._exact_size:
            at = torch.arange(span.past, span.tokens, device=x.device)
            self._exact_pages[self._exact_blocks[at // self._exact_size], at % self._exact_size] = x[0].transpose(0, 1)
        self._put(span, x, reserve, packed)

    def _recent(self, rows: slice, start: int, stop: int) -> list[Tensor]:
        return [self._exact(start, stop)] if start < stop else []

    def _exact(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) in full precision, `[1, heads, stop - start, head_dim]`."""
        at = torch.arange(start, stop, device=self._exact_pages.device)
        numbers = self._exact_pages[self._exact_blocks[at // self._exact_size], at % self._exact_size]
        return numbers.transpose(0, 1).unsqueeze(0)

    def exact_of(self, lengths: Tensor, blocks: Tensor) -> tuple[Tensor | None, Tensor]:
        """(sinks, ring) of sequences of `lengths` tokens, int32 `[rows]`, as `Stream` holds them: `[rows, heads,
        tokens, head_dim]`. blocks: of exact tokens, integers `[rows, blocks]`. Places of tokens that are packed, or not
        there, are any numbers."""
        sinks, room = self.window.sinks, max(self.ring_size, 1)
        newest = lengths.long()[:, None] - 1
        places = torch.arange(room, device=lengths.device)
        recent = newest - (newest - sinks - places) % room
        first = torch.arange(sinks, device=lengths.device).expand(len(lengths), -1)
        return self._gathered(first, blocks) if sinks else None, self._gathered(recent, blocks)

    def _gathered(self, tokens: Tensor, blocks: Tensor) -> Tensor:
        """Exact tokens `[rows, n]` of the sequences, `[rows, heads, n, head_dim]`."""
        tokens = tokens.clamp(min=0)
        pages = blocks.gather(1, (tokens // self._exact_size).clamp(max=blocks.shape[1] - 1))
        numbers = self._exact_pages[pages.clamp(0, len(self._exact_pages) - 1).long(), tokens % self._exact_size]
        return numbers.transpose(1, 2).contiguous()

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = 1 << 30
    ) -> Iterator[tuple[int, int, Tensor]]:
        first, last = self.split(tokens)
        for begin, end in ((start, min(first, stop)), (max(start, last), min(tokens, stop))):
            for cut in range(begin, end, size):
                upto = min(cut + size, end)
                yield cut, upto, self._exact(cut, upto)
