"""Storage of packed tokens that grows without moving: a list of segments, each allocated once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.cache.growth import MIN_GROWTH, grown
from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.codecs.base import Packed, Part, concatenate


@dataclass
class Segment:
    """Room for tokens [start, start + tokens) of all rows: parts as in `Packed`, for the whole batch."""

    start: int
    tokens: int
    parts: dict[str, Part]

    def view(self, rows: slice, start: int, stop: int) -> Packed:
        """Tokens [start, stop) of `rows`, without a copy. Both are multiples of the block and lie in the segment."""
        cut = {}
        for name, part in self.parts.items():
            first, last = (start - self.start) // part.unit, (stop - self.start) // part.unit
            tensor = part.tensor[:, :, first:last]
            cut[name] = Part(tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows], part.unit)
        return Packed(stop - start, cut)


class PackedStore:
    """Packed runs of all rows of a batch, token 0 first. Rows may be filled to different lengths.

    The first segment has the size of the first write, or `room`, the known final tokens per row; later segments
    have at least `MIN_GROWTH` tokens and an eighth of the store, at most `MAX_GROWTH`, so that long generations
    need few segments and waste little.
    """

    def __init__(self, block_tokens: int, room: int = 0) -> None:
        self.block_tokens, self.room = block_tokens, room
        self.segments: list[Segment] = []
        #: Bytes of the largest copy that `whole` made.
        self.joined = 0

    @property
    def capacity(self) -> int:
        """Tokens per row for which there is room."""
        return self.segments[-1].start + self.segments[-1].tokens if self.segments else 0

    def write(self, rows: slice, batch: int, start: int, packed: Packed, reserve: int = 0) -> None:
        """Put `packed` of `rows` at tokens [start, start + packed.tokens); `start` is a multiple of the block.

        batch: rows of the whole batch. reserve: tokens that the longest row will need at once.
        """
        stop = start + packed.tokens
        if not self.segments and packed.tokens >= max(reserve, MIN_GROWTH, self.room) and rows == slice(0, batch):
            self._adopt(packed)
            return
        if stop > self.capacity:
            self._grow(max(stop, reserve) - self.capacity, batch, packed)
        for segment in self.segments:
            first, last = max(start, segment.start), min(stop, segment.start + segment.tokens)
            if first < last:
                target = segment.view(rows, first, last)
                for name, part in packed.parts.items():
                    cut = part.tensor[:, :, (first - start) // part.unit : (last - start) // part.unit]
                    target.parts[name].tensor.copy_(cut)

    def write_at(self, entries: Callable[[int, int], Tensor], packed: Packed) -> None:
        """`write` of all rows at a place that only the device knows, into one segment with room. entries: (unit, count)
        -> places of the packed entries, int64 `[count]`."""
        (segment,) = self.segments
        for name, part in packed.parts.items():
            index = entries(part.unit, packed.tokens // part.unit)
            segment.parts[name].tensor.index_copy_(2, index, part.tensor)

    def read(self, rows: slice, start: int, stop: int) -> Packed:
        """Tokens [start, stop) of `rows`: a view inside one segment, a copy of the packed parts across several."""
        views = [
            segment.view(rows, max(start, segment.start), min(stop, segment.start + segment.tokens))
            for segment in self.segments
            if segment.start < stop and start < segment.start + segment.tokens
        ]
        return views[0] if len(views) == 1 else concatenate(views)

    def whole(self) -> Packed | None:
        """All rows and all room as one segment, for kernels, which read nothing else; None while the store is empty. A
        store that grew beyond its `room` is copied into one segment for that, once after each growth."""
        if not self.segments:
            return None
        if len(self.segments) > 1:
            self._join()
        return Packed(self.segments[0].tokens, self.segments[0].parts)

    def tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """(first, last, packed) of at most `size` tokens each, covering [start, stop)."""
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield first, last, self.read(rows, first, last)

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows `index` (int64, on the parts' device), in that order."""
        for segment in self.segments:
            segment.parts = {n: Part(p.tensor.index_select(0, index), p.unit) for n, p in segment.parts.items()}

    def drop(self, tokens: int, used: int, batch: int, room: int) -> None:
        """Forget the first `tokens` tokens of every row: the others move to the front of a new segment, with room for
        `room` tokens at least. used: tokens of the longest row. batch: rows of the whole batch."""
        rows = slice(0, batch)
        kept = self.read(rows, tokens, used) if used > tokens else None
        self.segments, self.room = [], room
        if kept is not None:
            self._grow(kept.tokens, batch, kept)
            self.write(rows, batch, 0, kept)

    def bytes_used(self, tokens: int) -> Mapping[str, int]:
        """Bytes by part of `tokens` tokens (all rows together)."""
        if not self.segments:
            return {}
        return {name: tokens * size // unit for name, (unit, size) in self._entry_sizes().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(p.tensor.numel() * p.tensor.element_size() for s in self.segments for p in s.parts.values())

    def _entry_sizes(self) -> dict[str, tuple[int, int]]:
        """Per part: (unit, bytes of one row's entry for one unit)."""
        sizes = {}
        for name, part in self.segments[0].parts.items():
            shape = part.tensor.shape
            sizes[name] = (part.unit, part.tensor.element_size() * part.tensor.numel() // (shape[0] * shape[2]))
        return sizes

    def _adopt(self, packed: Packed) -> None:
        parts = {name: Part(_owned(part.tensor), part.unit) for name, part in packed.parts.items()}
        self.segments.append(Segment(0, packed.tokens, parts))

    @changes_stored_tensors  # attention calls `whole`, which may run in inference mode
    def _join(self) -> None:
        packed = concatenate([Packed(segment.tokens, segment.parts) for segment in self.segments])
        self.segments = [Segment(0, packed.tokens, dict(packed.parts))]
        self.joined = max(self.joined, packed.nbytes)

    def _grow(self, need: int, batch: int, like: Packed) -> None:
        tokens = grown(need, self.capacity, self.room, self.block_tokens)
        parts = {}
        for name, part in like.parts.items():
            shape = (batch, part.tensor.shape[1], tokens // part.unit, *part.tensor.shape[3:])
            parts[name] = Part(part.tensor.new_zeros(shape), part.unit)
        self.segments.append(Segment(self.capacity, tokens, parts))


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous, the only tensor in its storage, and of a kind that may be changed in every mode."""
    tensor = tensor.contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone and not tensor.is_inference() else tensor.clone()
