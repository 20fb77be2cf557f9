"""A step in which each sequence decodes one token, or one and drafted ones: where the tokens lie in pages.

A row is one token and its query. The tokens of a sequence are rows with the same pages, each as long as the sequence up
to it: all are stored before any packs, and a row reads what was packed when its token was the newest. A drafted token
that is rejected leaves numbers and codes where the next step writes: a row reads none behind its own length.

Indices and tables that layers need alike are made once; see `Shared`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.shared import Shared
from kvq_cli.methods.window import Window
from kvq_cli.vllm.rope import inverse_tables

#: (pages, slots): places in pages, int64 tensors of one shape.
Places = tuple[Tensor, Tensor]


class Step(Shared):
    """New tokens of sequences, as kernels take them.

    lengths: int32 `[sequences]`, their tokens with all new ones; 0: no sequence. blocks: int32 `[sequences, blocks]`.
    exact_blocks: integers `[sequences, blocks]`, or None. known: the lengths of all rows on the host; None: every row
    encodes the tokens that it would pack next, as in a CUDA graph, which reads the tensors anew. chosen: int64
    `[rows]`, which rows of another step these are. queries: new tokens of each sequence, which are rows one after
    another; the tensors of the step are `[rows]` and `[rows, blocks]`.
    """

    def __init__(
        self,
        lengths: Tensor,
        blocks: Tensor,
        exact_blocks: Tensor | None,
        known: list[int] | None = None,
        chosen: Tensor | None = None,
        queries: int = 1,
    ) -> None:
        super().__init__()
        self._sequences = lengths, blocks, exact_blocks
        self.known, self.chosen, self._queries = known, chosen, queries
        self._layers: set[int] = set()

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row's sequence up to its own, int32."""
        lengths = self._sequences[0]
        return lengths if self._queries == 1 else self.kept("lengths", lambda: self._lengths(lengths))

    def _lengths(self, lengths: Tensor) -> Tensor:
        behind = torch.arange(self._queries - 1, -1, -1, dtype=lengths.dtype, device=lengths.device)
        return (lengths[:, None] - behind).clamp_(min=0).flatten()

    @property
    def blocks(self) -> Tensor:
        return self._repeated("blocks", self._sequences[1])

    @property
    def exact_blocks(self) -> Tensor | None:
        exact = self._sequences[2]
        return None if exact is None else self._repeated("exact", exact)

    def _repeated(self, key: str, blocks: Tensor) -> Tensor:
        """Return the blocks of each row's sequence."""
        return blocks if self._queries == 1 else self.kept(key, lambda: blocks.repeat_interleave(self._queries, 0))

    def enter(self, layer: int) -> None:
        """Call before a layer uses the step. A layer that comes again begins another pass, as when vLLM captures a step
        after it ran once: the graph must hold the work that makes what layers share."""
        if layer in self._layers:
            self._made.clear()
            self._layers.clear()
        self._layers.add(layer)

    def packing(self, window: Window) -> Step | None:
        """The rows that pack tokens, as far as the host knows; None: no row does."""
        if self.known is None:
            return self
        rows = [row for row, n in enumerate(self.known) if window.packed(n) > window.packed(n - 1)]
        if not rows:
            return None
        return self if len(rows) == len(self.known) else self.kept(("rows", *rows), lambda: self._rows(rows))

    def _rows(self, rows: list[int]) -> Step:
        assert self.known is not None
        index = sent(rows, torch.int64, self.lengths.device)
        tensors = (None if x is None else x[index] for x in (self.lengths, self.blocks, self.exact_blocks))
        lengths, blocks, exact = tensors
        assert lengths is not None and blocks is not None
        return Step(lengths, blocks, exact, [self.known[row] for row in rows], index)

    def packed(self, window: Window, new: bool = True) -> Tensor:
        """`Window.packed` of each row, int32 `[rows]`: with its new token, or without."""
        return self.kept(("packed", window, new), lambda: packed_of(window, self.lengths if new else self.lengths - 1))

    def inverse_tables(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The tables that undo the rotation of the new keys `[rows, heads, head_dim]`."""
        return self.kept(("rotation", rotation), lambda: inverse_tables(rotation, self._newest[:, None]))

    @property
    def _newest(self) -> Tensor:
        """The new token of each row, int64."""
        return self.kept("newest", lambda: (self.lengths.long() - 1).clamp_(min=0))

    # -- places in pages -----------------------------------------------------------------------------------------

    def new_places(self, size: int) -> Places:
        """Where the new tokens are in exact pages of `size` tokens, `[rows]`."""
        return self.kept(("new", size), lambda: self._new_places(size))

    def _new_places(self, size: int) -> Places:
        assert self.exact_blocks is not None
        page = self.exact_blocks.gather(1, (self._newest // size)[:, None])
        return page.squeeze(1).long(), self._newest % size

    def flush_places(self, window: Window, size: int, pages: int) -> Places:
        """Where the tokens are that rows pack next, in `pages` exact pages: `[rows, 1, flush]`."""

        def tokens() -> Tensor:
            flush = torch.arange(window.sinks, window.sinks + window.flush, device=self.lengths.device)
            return self.packed(window, new=False).long()[:, None] + flush

        return self.kept(("flush", window, size, pages), lambda: self._exact_places(tokens(), size, pages))

    def sink_places(self, sinks: int, size: int, pages: int) -> Places:
        """Where the first tokens are, `[rows, 1, sinks]`."""

        def tokens() -> Tensor:
            return torch.arange(sinks, device=self.lengths.device).expand(len(self.lengths), -1)

        return self.kept(("sinks", sinks, size, pages), lambda: self._exact_places(tokens(), size, pages))

    def ring_places(self, sinks: int, room: int, size: int, pages: int) -> Places:
        """Where the newest tokens are, `[rows, 1, room]`, each at its place in a ring as `Stream` has it. Places of
        tokens that are not there, or packed, are any."""

        def tokens() -> Tensor:
            newest = self.lengths.long()[:, None] - 1
            return newest - (newest - sinks - torch.arange(room, device=self.lengths.device)) % room

        return self.kept(("ring", sinks, room, size, pages), lambda: self._exact_places(tokens(), size, pages))

    def _exact_places(self, tokens: Tensor, size: int, pages: int) -> Places:
        """Of tokens `[rows, n]`, with an axis for heads: `[rows, 1, n]`."""
        assert self.exact_blocks is not None
        tokens = tokens.clamp(min=0)
        page = self.exact_blocks.gather(1, (tokens // size).clamp_(max=self.exact_blocks.shape[1] - 1))
        return page.clamp(0, pages - 1).long().unsqueeze(1), (tokens % size).unsqueeze(1)

    def heads(self, count: int) -> Tensor:
        """0, 1, ... as an index beside `[rows, 1, n]`."""
        return self.kept(("heads", count), lambda: torch.arange(count, device=self.lengths.device).view(1, -1, 1))

    def packed_places(self, window: Window, shift: int, units: int, unit: int, count: int) -> Places:
        """Where rows store the `count` entries of a part that they pack, `[rows, count]`: pages have `units` entries of
        `unit` tokens. Page 0, which vLLM leaves to no sequence, for rows that need not pack."""
        key = "place", window, shift, units, unit, count
        return self.kept(key, lambda: self._packed_places(window, shift, units, unit, count))

    def _packed_places(self, window: Window, shift: int, units: int, unit: int, count: int) -> Places:
        before = self.packed(window, new=False)
        place = ((before + shift) // unit).long()[:, None] + torch.arange(count, device=before.device)
        page = self.blocks.gather(1, (place // units).clamp_(max=self.blocks.shape[1] - 1)).long()
        if self.known is None:
            page.masked_fill_((self.packed(window) <= before)[:, None], 0)
        return page, place % units


def packed_of(window: Window, lengths: Tensor) -> Tensor:
    """`Window.packed` of each length."""
    count = (lengths - (window.sinks + window.recent)).clamp_(min=0)
    return count if window.flush == 1 else count.div_(window.flush, rounding_mode="floor").mul_(window.flush)


def sent(numbers: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on the device. From pinned memory: a copy from other memory would wait for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
