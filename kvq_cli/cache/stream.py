"""One stream of a layer, its keys or its values: `sinks | packed | recent` of every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.shared import CachePosition
from kvq_cli.cache.snapshot import Snapshot
from kvq_cli.cache.store import PackedStore
from kvq_cli.codecs.base import Codec, Packed, PromptCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.methods.base import StreamPlan
from kvq_cli.methods.window import Window


class StreamReader(Protocol):
    """The interface that attention reads: tokens of a stream, in full precision and packed."""

    @property
    def window(self) -> Window: ...

    @property
    def ring(self) -> Tensor:
        """The tensor of the recent tokens; it has the heads, channels and dtype of all tokens."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""

    @property
    def packed_tokens(self) -> int:
        """Packed tokens of all rows together."""

    def coder(self, rows: slice) -> Codec: ...

    def prompt_tokens(self, rows: slice) -> int: ...

    def split(self, tokens: int) -> tuple[int, int]: ...

    @property
    def joins_rows(self) -> bool:
        """Whether token i of all rows lies in the same place: `packed` may read rows of different lengths together, and
        of shorter ones finite numbers that mean nothing."""

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = ...
    ) -> Iterator[tuple[int, int, Tensor]]: ...

    def packed(
        self, rows: slice, tokens: int, start: int, stop: int, size: int
    ) -> Iterator[tuple[int, int, Packed]]: ...

    def read(self, row: int, dtype: torch.dtype = ...) -> Tensor: ...


class Stream:
    """Cached numbers `[batch, kv_heads, tokens, head_dim]`, stored as the plan says.

    The stored bits of a row depend on its tokens only: not on how many are added at once, not on other rows. Tokens
    [0, sinks) are in `sinks`, the next `window.packed(tokens)` in `store`, the newest in `ring`, token i at
    (i - sinks) % ring_size. `PromptStream` is for codecs that are fit to the prompt.

    After `allow_rollback(k)` the ring still holds the tokens that the newest k tokens packed: `crop` can unpack them.

    A stream that `dropped` tokens of every row counts all others from 0 on, as if they were all, and has no sinks.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self.plan, self.codec, self.ring_size = plan, plan.codec, plan.window.ring
        self._room = self.rollback = 0
        self.reset()

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens at once, when the first of them are packed."""
        self._room = self.store.room = self.plan.window.packed(tokens)

    def reserve_like(self, other: Stream) -> None:
        """Make as much room as was reserved in another stream of this plan."""
        self._room = self.store.room = other._room

    def reset(self) -> None:
        """Forget all rows and free their memory."""
        self._behind(0)
        self.lengths: list[int] = []
        #: Packed tokens of each row that stay packed: the ring holds the numbers of later ones.
        self._final: list[int] = []
        #: Empty until the first tokens come.
        self.sinks = self.ring = torch.empty(0)
        self.store = PackedStore(self.codec.block_tokens, self._room)

    def _behind(self, dropped: int) -> None:
        """Count tokens from behind the first `dropped` on."""
        #: Tokens of every row that are held no more.
        self.dropped, self.window = dropped, self.plan.window.behind(dropped)

    def allow_rollback(self, tokens: int) -> None:
        """Hold what `crop` needs to remove the newest `tokens` tokens, of those that come from now on."""
        if self.keeps_numbers or tokens <= self.rollback:
            return
        self.rollback, flush = tokens, self.window.flush
        size = self.window.ring + -(-tokens // flush) * flush
        if self.lengths:
            ring = self.ring.new_zeros(*self.ring.shape[:2], size, self.ring.shape[3])
            for row, (final, length) in enumerate(zip(self._final, self.lengths, strict=True)):
                held = self._tokens_behind(final, length)
                ring[row].index_copy_(1, held % size, self.ring[row].index_select(1, held % self.ring_size))
            self.ring = ring
        self.ring_size = size

    def rollback_like(self, other: Stream) -> None:
        """Hold in full precision what another stream of this plan and these tokens does."""
        self.rollback, self.ring_size, self._final = other.rollback, other.ring_size, list(other._final)
        self.ring = other.ring.clone()

    def coder(self, rows: slice) -> Codec:
        """The codec that encodes and decodes `rows`."""
        if isinstance(self.codec, PromptCodec):
            raise TypeError(f"{type(self.codec).__name__} needs a PromptStream: see new_stream")
        return self.codec

    def prompt_tokens(self, rows: slice) -> int:
        """How many of the packed tokens of each of `rows` are stored apart from later ones."""
        return 0

    def split(self, tokens: int) -> tuple[int, int]:
        """(first, last): tokens [first, last) of a row of `tokens` tokens are packed."""
        first = min(tokens, self.window.sinks)
        return first, first + self.window.packed(tokens)

    @property
    def joins_rows(self) -> bool:
        """See `StreamReader`."""
        return True

    @property
    def packed_tokens(self) -> int:
        """Packed tokens of all rows together."""
        return sum(self.window.packed(length) for length in self.lengths)

    @property
    def keeps_numbers(self) -> bool:
        """Whether tokens are stored as they come, one by one, so that any of the last can be removed."""
        return isinstance(self.codec, IdentityCodec) and self.window.recent == 0 and self.window.flush == 1

    # -- append --------------------------------------------------------------------------------------------------

    def append(self, x: Tensor, spans: tuple[RowSpan, ...], cache_position: CachePosition | None = None) -> None:
        """Add `x` `[batch, kv_heads, columns, head_dim]` to the rows as `spans` say; pads are dropped.

        cache_position: see `Forward`; only where the stream `can_capture`.
        """
        if cache_position is not None:
            self._append_at(spans[0], x, cache_position)
            self.advance(spans)
            return
        if not self.lengths:
            self._allocate(x)
        reserve = max(self._stored(span.rows, span.tokens) for span in spans)
        parts = [(span, x[span.rows, :, span.pads :]) for span in spans if span.tokens > span.past]
        together = self._encode_together(parts) if len(parts) > 1 else None
        for number, (span, new) in enumerate(parts):
            self._append(span, new, reserve, None if together is None else together[number])
        self.advance(spans)

    def advance(self, spans: tuple[RowSpan, ...]) -> None:
        """Count the tokens of a pass whose numbers are stored already."""
        for span in spans:
            self._final[span.rows] = [self._final_of(span)] * (span.rows.stop - span.rows.start)
            self.lengths[span.rows] = [span.tokens] * (span.rows.stop - span.rows.start)

    def _final_of(self, span: RowSpan) -> int:
        """How many packed tokens of the rows of `span` stay packed from its pass on."""
        if not self.rollback:
            return self.window.packed(span.tokens)
        return max(self._final[span.rows.start], self.window.packed(span.tokens - self.rollback))

    def to_pack(self, span: RowSpan, x: Tensor) -> Tensor | None:
        """The tokens that are packed when `x`, without pads, is added to `span`: the oldest of the ring, then of `x`;
        None: no tokens are."""
        first, last = (self.window.sinks + self.window.packed(tokens) for tokens in (span.past, span.tokens))
        if last == first:
            return None
        pieces = self._recent(span.rows, first, min(span.past, last))
        if last > span.past:
            pieces.append(x[:, :, max(first - span.past, 0) : last - span.past])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _allocate(self, x: Tensor) -> None:
        batch, heads, _, dim = x.shape
        self.lengths, self._final = [0] * batch, [0] * batch
        self.sinks = x.new_zeros(batch, heads, self.window.sinks, dim)
        self.ring = x.new_zeros(batch, heads, self.ring_size, dim)

    def _encode_together(self, parts: Sequence[tuple[RowSpan, Tensor]]) -> list[Packed] | None:
        """What is packed of each span, encoded in one operation; None where spans pack different numbers of tokens:
        at a step of rows of different lengths either all pack one token, or few rows pack at all."""
        rows = slice(parts[0][0].rows.start, parts[-1][0].rows.stop)
        if not self._joins_encoding or rows.stop - rows.start != sum(len(x) for _, x in parts):
            return None  # or rows without a token lie between
        counts = {self.window.packed(span.tokens) - self.window.packed(span.past) for span, _ in parts}
        runs = [run for span, x in parts if (run := self.to_pack(span, x)) is not None] if len(counts) == 1 else []
        if not runs:
            return None
        packed = self.coder(rows).encode(torch.cat(runs))
        return [packed.of_rows(span.rows.start - rows.start, span.rows.stop - rows.start) for span, _ in parts]

    @property
    def _joins_encoding(self) -> bool:
        """Whether one codec encodes the next tokens of all rows."""
        return self.joins_rows

    def _append(self, span: RowSpan, x: Tensor, reserve: int, packed: Packed | None = None) -> None:
        """packed: what is packed of the span, where it is encoded already."""
        past, tokens, sinks = span.past, span.tokens, self.window.sinks
        if past < sinks:
            count = min(tokens, sinks) - past
            self.sinks[span.rows, :, past : past + count] = x[:, :, :count]
        self._put(span, x, reserve, packed)
        start = max(sinks + self._final_of(span), past)
        for begin, end in self._ring_slices(start, tokens):
            self.ring[span.rows, :, begin:end] = x[:, :, start - past : start - past + end - begin]
            start += end - begin

    def _put(self, span: RowSpan, x: Tensor, reserve: int, packed: Packed | None) -> None:
        """Store what is packed when `x` comes, if anything is."""
        if packed is None:
            self._pack(span, self.to_pack(span, x), reserve)
        else:
            self._write(span, packed, reserve)

    def _append_at(self, span: RowSpan, x: Tensor, cache_position: CachePosition) -> None:
        """`_append` of one token to all rows: the host decides whether tokens are packed, the device where."""
        window = self.window
        self.ring.index_copy_(2, cache_position.ring_place(window, self.ring_size), x)
        if window.packed(span.tokens) > window.packed(span.past):
            run = self.ring.index_select(2, cache_position.flush_places(window, self.ring_size))
            self.store.write_at(partial(cache_position.entries, window), self.coder(span.rows).encode(run))

    def _pack(self, span: RowSpan, x: Tensor | None, reserve: int) -> None:
        """Encode and store `x`, the tokens of `span` that are packed, if any; `reserve` as in `PackedStore.write`."""
        if x is not None:
            self._write(span, self.coder(span.rows).encode(x), reserve)

    def _write(self, span: RowSpan, packed: Packed, reserve: int) -> None:
        self.store.write(span.rows, len(self.lengths), self._stored(span.rows, span.past), packed, reserve)

    def _stored(self, rows: slice, tokens: int) -> int:
        """How many of `tokens` tokens of `rows` lie in `store`."""
        return self.window.packed(tokens) - self.prompt_tokens(rows)

    def _ring_slices(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) as at most two slices of the ring."""
        if start >= stop:
            return []
        begin = (start - self.window.sinks) % self.ring_size
        end = begin + stop - start
        return [(begin, end)] if end <= self.ring_size else [(begin, self.ring_size), (0, end - self.ring_size)]

    def _recent(self, rows: slice, start: int, stop: int) -> list[Tensor]:
        return [self.ring[rows, :, begin:end] for begin, end in self._ring_slices(start, stop)]

    # -- CUDA graphs ---------------------------------------------------------------------------------------------

    def can_capture(self, past: int) -> bool:
        """Whether a token can be added to rows of `past` tokens each, at a position that only the device knows."""
        if not self.lengths or past < self.window.sinks:
            return False
        packed = self.window.packed(past + 1)
        room = len(self.store.segments) == 1 and packed <= self.store.capacity
        return room or packed == self.window.packed(past)

    def tensors(self) -> list[Tensor]:
        """All tensors that a decode step reads or writes; a captured step is valid while they are the same."""
        parts = [part.tensor for segment in self.store.segments for part in segment.parts.values()]
        return [self.sinks, self.ring, *parts]

    # -- read ----------------------------------------------------------------------------------------------------

    def exact(
        self, rows: slice, tokens: int, start: int, stop: int, size: int = 1 << 30
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The tokens of [start, stop) that rows of `tokens` tokens hold in full precision, in order: (first, last, view
        `[rows, kv_heads, last - first, head_dim]`), at most `size` tokens each."""
        first, last = self.split(tokens)
        pieces = [(start, self.sinks, start, min(first, stop))]
        at = max(start, last)
        for begin, end in self._ring_slices(at, min(tokens, stop)):
            pieces.append((at, self.ring, begin, end))
            at += end - begin
        for at, numbers, begin, end in pieces:
            for cut in range(begin, end, size):
                upto = min(cut + size, end)
                yield at + cut - begin, at + upto - begin, numbers[rows, :, cut:upto]

    def packed(self, rows: slice, tokens: int, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """The tokens of [start, stop) that rows of `tokens` tokens hold packed: (first, last, packed), at most `size`
        tokens each, rounded down to whole blocks, at least one; `first` may be before `start`."""
        sinks, end = self.split(tokens)
        block = self.codec.block_tokens
        first = (max(start, sinks) - sinks) // block * block
        last = min(-(-(min(stop, end) - sinks) // block) * block, end - sinks)
        for begin, upto, packed in self._tiles(rows, first, last, max(block, size // block * block)):
            yield begin + sinks, upto + sinks, packed

    def _tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        """Packed tokens [start, stop) of `rows`, sinks not counted, at most `size` at a time."""
        return self.store.tiles(rows, start, stop, size)

    def read(self, row: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """All tokens of one row that are held, `[1, kv_heads, tokens, head_dim]`: packed tokens decoded."""
        rows, tokens = slice(row, row + 1), self.lengths[row]
        pieces = [(first, x.to(dtype)) for first, _, x in self.exact(rows, tokens, 0, tokens)]
        coder = self.coder(rows)
        for first, _, packed in self.packed(rows, tokens, 0, tokens, tokens or 1):
            pieces.append((first, coder.decode(packed, dtype)))
        return torch.cat([x for _, x in sorted(pieces, key=lambda piece: piece[0])], dim=2)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All tokens, as tensors that may be views of the stream's own. Of a stream that holds rows."""
        recent = [self.ring[row].index_select(1, self._ring_index(length)) for row, length in enumerate(self.lengths)]
        # Rows that were cropped may have held more sinks than they have tokens.
        sinks = self.sinks[:, :, : min(max(self.lengths), self.window.sinks)]
        lengths = torch.tensor(self.lengths, device=sinks.device).view(-1, 1, 1, 1)
        places = torch.arange(sinks.shape[2], device=sinks.device).view(1, 1, -1, 1)
        return Snapshot(
            tuple(self.lengths),
            sinks.masked_fill(places >= lengths, 0),
            pad_sequence([x.transpose(0, 1) for x in recent], batch_first=True).transpose(1, 2),
            self._used(self.store, [self._stored(slice(row, row + 1), n) for row, n in enumerate(self.lengths)]),
            dropped=self.dropped,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Hold the tokens of `snapshot` instead; its packed tensors may become the stream's own."""
        self.reset()
        self._behind(snapshot.dropped)
        self._allocate(snapshot.sinks)
        self.lengths = list(snapshot.lengths)
        self._final = [self.window.packed(length) for length in self.lengths]
        self.sinks[:, :, : snapshot.sinks.shape[2]] = snapshot.sinks
        for row, length in enumerate(self.lengths):
            index = self._ring_index(length)
            self.ring[row].index_copy_(1, index, snapshot.recent[row, :, : len(index)])
        if snapshot.packed is not None:
            self.store.write(slice(0, len(self.lengths)), len(self.lengths), 0, snapshot.packed)

    def check(self) -> None:
        """Raise KvqError for packed numbers that the codec cannot have stored; see `Codec.check`."""
        for row, tokens in enumerate(self.lengths):
            rows = slice(row, row + 1)
            for _, _, packed in self.packed(rows, tokens, 0, tokens, tokens or 1):
                self.coder(rows).check(packed)

    def _ring_index(self, length: int) -> Tensor:
        """The places in the ring of the recent tokens of a row of `length` tokens."""
        return self._tokens_behind(self.window.packed(length), length) % self.ring_size

    def _tokens_behind(self, packed: int, length: int) -> Tensor:
        """The tokens of a row of `length` tokens behind the sinks and `packed` more, counted from the sinks on."""
        return torch.arange(packed, max(0, length - self.window.sinks), device=self.ring.device)

    @staticmethod
    def _used(store: PackedStore, stored: list[int]) -> Packed | None:
        """The packed tokens of a store whose rows hold so many; None where there are none."""
        if not any(stored):
            return None
        packed = store.read(slice(0, len(stored)), 0, max(stored))
        for row, count in enumerate(stored):
            for part in packed.parts.values():  # of tokens that were removed
                part.tensor[row, :, count // part.unit :] = 0
        return packed

    # -- drop, crop and select -----------------------------------------------------------------------------------

    def drop(self, dropped: int, room: int) -> None:
        """Forget the first `dropped` tokens of every row, those forgotten before included: all sinks, and packed tokens
        in whole flushes. room: of `PackedStore.drop`. Tensors are replaced, so that captured steps are made anew."""
        packed = dropped - self.dropped - self.window.sinks
        used = max(self.window.packed(length) for length in self.lengths)
        self.store.drop(packed, used, len(self.lengths), room)
        self.lengths = [length - (dropped - self.dropped) for length in self.lengths]
        self._final = [max(0, final - packed) for final in self._final]
        self.ring, self.sinks = self.ring.roll(-packed, dims=2), self.sinks[:, :, :0].clone()
        self._behind(dropped)

    def crop(self, tokens: int) -> None:
        """Remove each row's last `tokens` tokens; see `croppable`."""
        self.lengths = [max(0, length - tokens) for length in self.lengths]
        self._final = [min(n, self.window.packed(length)) for n, length in zip(self._final, self.lengths, strict=True)]

    def croppable(self, tokens: int) -> bool:
        """Whether the last `tokens` tokens can be removed: all that are then recent are in the ring, or packed as they
        came."""
        return self.keeps_numbers or all(
            self.window.packed(max(0, length - tokens)) >= final
            for length, final in zip(self.lengths, self._final, strict=True)
        )

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` (int64), in that order."""
        if not self.lengths:
            return
        self.lengths, self._final = ([numbers[i] for i in index.tolist()] for numbers in (self.lengths, self._final))
        index = index.to(self.ring.device)
        self.sinks, self.ring = self.sinks.index_select(0, index), self.ring.index_select(0, index)
        self.store.select(index)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of the tensors held: the packed parts, "sinks", "recent", "rollback" (packed tokens in full precision,
        too), "unused" (allocated for later tokens)."""
        if not self.lengths:
            return {}
        parts = self._packed_bytes()
        allocated = self.sinks.nbytes + self.ring.nbytes + self._allocated_bytes()
        token = self.ring.shape[1] * self.ring.shape[3] * self.ring.element_size()
        sinks = sum(min(length, self.window.sinks) for length in self.lengths)
        parts["sinks"] = token * sinks
        parts["recent"] = token * (sum(self.lengths) - sinks - self.packed_tokens)
        if self.rollback:
            parts["rollback"] = token * (self.packed_tokens - sum(self._final))
        parts["unused"] = allocated - sum(parts.values())
        return parts

    def reserved_bytes(self) -> int:
        """Those of the "unused" bytes that are packed room behind the longest row: for later tokens."""
        stored = [self._stored(slice(row, row + 1), length) for row, length in enumerate(self.lengths)]
        room = self.store.capacity - max(stored, default=0)
        return sum(self.store.bytes_used(len(stored) * room).values())

    def _packed_bytes(self) -> dict[str, int]:
        """Bytes by part of the packed tokens; empty parts are omitted."""
        return dict(+Counter(self.store.bytes_used(self.packed_tokens)))

    def _allocated_bytes(self) -> int:
        """Bytes of all packed parts, allocated room included."""
        return self.store.nbytes
