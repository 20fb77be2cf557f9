"""Rows of a left-padded batch: padding, and the tokens and positions that a forward pass adds to each row.

A batch is left-padded: row b of `columns` columns holds `pads[b]` pads and then its tokens. The cache keeps no pads:
each row's tokens are counted 0, 1, ... from its first real one, so that a row is stored as if it were alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from kvq_cli.cache.shared import CachePosition
from kvq_cli.errors import UsageError

#: Most columns of a short pass.
SHORT_COLUMNS = 16


def would_sync(device: torch.device, columns: int) -> bool:
    """Whether a host read in a pass of `columns` columns would synchronize with the device at every new token. Checks
    of the prompt are then not repeated at decode steps."""
    return columns == 1 and device.type != "cpu"


@dataclass(frozen=True)
class RowSpan:
    """Neighbouring rows with the same pads, tokens and positions in a forward pass, which are computed together.

    rows:   the rows of the batch.
    pads:   how many of the pass's columns are padding; they come first.
    past:   tokens before the pass.   tokens: tokens after it (past + columns - pads).
    offset: token i of a row has position i + offset.
    """

    rows: slice
    pads: int
    past: int
    tokens: int
    offset: int

    @property
    def last_position(self) -> int:
        """Position of the newest token."""
        return self.tokens - 1 + self.offset


@dataclass(frozen=True)
class Forward:
    """One forward pass of the model over `columns` new columns after `past_columns`, for a whole batch."""

    columns: int
    past_columns: int
    row_spans: tuple[RowSpan, ...]
    #: Leading pads of each row, out of all columns so far.
    row_pads: tuple[int, ...]
    #: Where the new token goes in a decode step that is captured once and then replayed: the work must be the same at
    #: every position.
    cache_position: CachePosition | None = field(default=None, compare=False)
    #: ids of the masks that were compared with this description: all layers of a kind share one mask.
    checked: set[int] = field(default_factory=set, compare=False)
    #: Tokens of every row that `row_spans` leave out.
    dropped: int = 0
    _behind: dict[int, Forward] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether the cache is empty before the pass."""
        return self.past_columns == 0

    def behind(self, dropped: int) -> Forward:
        """The pass for layers that dropped the first `dropped` tokens of every row: tokens are counted from behind them
        on, and keep their positions. All these layers get the same object."""
        if not dropped:
            return self
        if dropped not in self._behind:
            spans = tuple(
                replace(span, past=span.past - dropped, tokens=span.tokens - dropped, offset=span.offset + dropped)
                for span in self.row_spans
            )
            position = None if self.cache_position is None else self.cache_position.behind(dropped)
            self._behind[dropped] = replace(self, row_spans=spans, cache_position=position, dropped=dropped)
        return self._behind[dropped]

    @property
    def is_short(self) -> bool:
        """Whether the pass has few tokens, but several: a kernel may compute its attention as a decode step's."""
        return 1 < self.columns <= SHORT_COLUMNS

    def check_mask(self, mask: Tensor | None, window: int | None) -> None:
        """UsageError where the model's own mask `[batch, 1, columns, all columns]` (bool, True: seen) is not the one
        that the cache computes with: causal, left-padded, the last `window` tokens."""
        if mask is None or id(mask) in self.checked or (not self.is_first and would_sync(mask.device, self.columns)):
            return
        if mask.dtype != torch.bool or mask.ndim != 4:
            raise UsageError("a compressed cache needs a 2-D attention_mask of zeros and ones, not a prepared mask")
        total = self.past_columns + self.columns
        key = torch.arange(total, device=mask.device)
        query = torch.arange(self.past_columns, total, device=mask.device).unsqueeze(1)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        for row, pads in enumerate(self.row_pads):
            start = max(0, pads - self.past_columns)  # any mask will do for pads
            expected = (seen & (key >= pads))[start:]
            if mask.shape[-1] != total or not torch.equal(mask[row, 0, start:], expected):
                raise UsageError("this model masks attention in a way that the compressed cache does not reproduce")
        self.checked.add(id(mask))


@dataclass
class Rows:
    """Of each row of the cache, the leading pads so far, the offset of its positions, and the tokens of its prompt, the
    first pass that had any."""

    pads: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def begin(
        self, past: int, columns: int, batch: int, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Forward:
        """Describe a pass of `columns` columns after `past` columns.

        mask: `[batch, past + columns]`, 0 for pads; None: no pads. positions: `[batch or 1, columns]`; None: counted by
        column. UsageError for pads that are not on the left, and for positions that do not count on.
        """
        if columns == 0:
            raise UsageError("the prompt is empty: give at least one token")
        if past == 0:
            self.pads, self.offsets, self.prompts = [0] * batch, [0] * batch, [0] * batch
        if batch != len(self.pads):
            raise UsageError(f"the cache holds a batch of {len(self.pads)} rows, the input has {batch}")
        pads = self._leading_pads(past, columns, mask)
        first = self._first_positions(past, columns, pads, positions)
        situations = []
        for row in range(batch):
            skip, before = max(0, min(columns, pads[row] - past)), max(0, past - pads[row])
            if skip < columns:
                offset = first[row] - before
                if before and offset != self.offsets[row]:
                    raise UsageError(f"row {row}: position_ids do not count on from the tokens in the cache")
                self.offsets[row] = offset
                self.prompts[row] = self.prompts[row] if before else columns - skip
            situations.append((skip, before, self.offsets[row]))
        self.pads = pads
        return Forward(columns, past, tuple(_join(situations, columns)), tuple(pads))

    def select(self, index: list[int]) -> None:
        """Keep the rows `index`, in that order (beam search, batch selection)."""
        self.pads = [self.pads[i] for i in index]
        self.offsets = [self.offsets[i] for i in index]
        self.prompts = [self.prompts[i] for i in index]

    def copy(self) -> Rows:
        """Rows that share no list with these."""
        return Rows(list(self.pads), list(self.offsets), list(self.prompts))

    def _leading_pads(self, past: int, columns: int, mask: Tensor | None) -> list[int]:
        if mask is None:
            if any(self.pads):
                raise UsageError("the cache holds a left-padded batch: pass its attention_mask at every step")
            return self.pads
        if mask.ndim != 2 or mask.shape != (len(self.pads), past + columns):
            raise UsageError(
                f"attention_mask has shape {tuple(mask.shape)}, "
                f"the compressed cache needs (batch, cached + new tokens) = {(len(self.pads), past + columns)}"
            )
        if self._all_started(past) and would_sync(mask.device, columns):
            return self.pads
        real = mask.bool()
        counts = real.sum(dim=1).tolist()
        pads = [past + columns - count for count in counts]
        left = torch.arange(past + columns, device=mask.device) >= torch.tensor(pads, device=mask.device).unsqueeze(1)
        if not torch.equal(real, left):
            raise UsageError("attention_mask has zeros after a one: pad prompts on the left (padding_side='left')")
        for row, (now, before) in enumerate(zip(pads, self.pads, strict=True)):
            if min(now, past) != min(before, past):
                raise UsageError(f"row {row}: attention_mask disagrees with the tokens already in the cache")
        return pads

    def _all_started(self, past: int) -> bool:
        """Whether every row has a token among the first `past` columns."""
        return all(pads < past for pads in self.pads)

    def _first_positions(self, past: int, columns: int, pads: list[int], positions: Tensor | None) -> list[int]:
        """Position of each row's first real token of this pass."""
        skips = [max(0, min(columns - 1, n - past)) for n in pads]
        if positions is None:
            return [past + skip for skip in skips]
        if positions.ndim != 2 or positions.shape[1] != columns:
            raise UsageError(f"position_ids of shape {tuple(positions.shape)} are not supported: use (batch, tokens)")
        if self._all_started(past) and would_sync(positions.device, columns):
            return [offset + past - count for offset, count in zip(self.offsets, pads, strict=True)]
        rows = positions.tolist()
        rows = rows * len(pads) if len(rows) == 1 else rows
        for row, skip in zip(rows, skips, strict=True):
            if row[skip:] != list(range(row[skip], row[skip] + columns - skip)):
                raise UsageError("position_ids must count up by one from token to token")
        return [row[skip] for row, skip in zip(rows, skips, strict=True)]


def _join(situations: list[tuple[int, int, int]], columns: int) -> list[RowSpan]:
    """One span for each stretch of neighbouring rows of equal (pads, past, offset)."""
    spans: list[RowSpan] = []
    start = 0
    for (pads, past, offset), rows in groupby(situations):
        stop = start + len(list(rows))
        spans.append(RowSpan(slice(start, stop), pads, past, past + columns - pads, offset))
        start = stop
    return spans
