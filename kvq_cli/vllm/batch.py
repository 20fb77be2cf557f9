"""The sequences of a step of vLLM with any number of new tokens each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.shared import Shared
from kvq_cli.vllm.rope import inverse_tables
from kvq_cli.vllm.step import Places, Step, sent


class BlockTable(Shared):
    """The blocks of one sequence, int64 `[blocks]`, in order; exact blocks that were freed may be anything."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__()
        self.blocks = blocks

    def places(self, first: int, last: int, size: int) -> Places:
        """Places of entries [first, last) of the sequence, in pages of `size` entries."""
        return self.kept((first, last, size), lambda: self._places(first, last, size))

    def _places(self, first: int, last: int, size: int) -> Places:
        at = torch.arange(first, last, device=self.blocks.device)
        return self.blocks[at // size], at % size


@dataclass(frozen=True, eq=False)
class Sequence:
    """New tokens [start, stop) of a batch that belong to one sequence, which has `past` tokens before them.

    blocks, exact_blocks: the pages of the sequence, int64.
    """

    start: int
    stop: int
    past: int
    blocks: Tensor
    exact_blocks: Tensor | None
    shared: Shared = field(default_factory=Shared, repr=False)

    @property
    def tokens(self) -> int:
        """How many new tokens it has."""
        return self.stop - self.start

    @cached_property
    def table(self) -> BlockTable:
        """The pages of packed tokens."""
        return BlockTable(self.blocks)

    @cached_property
    def exact_table(self) -> BlockTable | None:
        """The pages of exact tokens."""
        return None if self.exact_blocks is None else BlockTable(self.exact_blocks)

    def inverse_tables(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The tables that undo the rotation of the new keys."""
        positions = self.past, self.past + self.tokens

        def made() -> tuple[Tensor, Tensor]:
            return inverse_tables(rotation, torch.arange(*positions, device=self.blocks.device))

        return self.shared.kept(rotation, made)


@dataclass(frozen=True)
class Rows:
    """Sequences of a batch that decode, a row for each of their tokens. places: where the tokens are in the batch."""

    places: slice | Tensor
    step: Step

    @staticmethod
    def of(sequences: list[Sequence]) -> Rows:
        """In the order of the batch."""
        sequences = sorted(sequences, key=lambda sequence: sequence.start)
        rows = [row for sequence in sequences for row in range(sequence.start, sequence.stop)]
        first, last = rows[0], rows[-1] + 1
        adjacent = len(rows) == last - first
        places = slice(first, last) if adjacent else sent(rows, torch.int64, sequences[0].blocks.device)
        return Rows(places, _step_of(sequences))


def _step_of(sequences: list[Sequence]) -> Step:
    """Return the step of these sequences, a row for each of their tokens."""
    device, each = sequences[0].blocks.device, [sequence for sequence in sequences for _ in range(sequence.tokens)]
    known = [sequence.past + 1 + new for sequence in sequences for new in range(sequence.tokens)]
    exact = [sequence.exact_blocks for sequence in each if sequence.exact_blocks is not None]
    blocks = torch.stack([sequence.blocks for sequence in each]).int()
    return Step(sent(known, torch.int32, device), blocks, torch.stack(exact) if exact else None, known)


@dataclass(frozen=True)
class Batch:
    """The sequences of a step of vLLM; one object for all layers.

    queries: most new tokens of a sequence that decodes: one, and those that are drafted for it.
    """

    sequences: list[Sequence]
    queries: int = 1

    @cached_property
    def writers_first(self) -> list[Sequence]:
        """The sequences in the order in which a layer appends and attends them: by the tokens before their new ones.

        vLLM publishes a block when it schedules the tokens in it, so a sequence can have a prefix hit on a block that
        another one computes in this step. The writer of such a block has fewer tokens before its new ones, but may come
        later in the batch. The order is the same on all ranks of tensor parallelism, whose codecs exchange tokens.
        """
        return sorted(self.sequences, key=lambda sequence: sequence.past)

    @cached_property
    def together(self) -> list[Sequence | Rows]:
        """`writers_first`, where sequences that decode and follow each other are appended together: their new tokens
        are stored before any of them packs."""
        found: list[Sequence | Rows] = []
        for decodes, run in groupby(self.writers_first, self._decodes):
            group = list(run)
            found += [self._rows(group)] if decodes else group
        return found

    def _decodes(self, sequence: Sequence) -> bool:
        return 1 <= sequence.tokens <= self.queries

    @cached_property
    def _decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if self._decodes(sequence)]

    @cached_property
    def decoded(self) -> Rows | None:
        """All sequences that decode; None where there are none."""
        return Rows.of(self._decoding) if self._decoding else None

    def _rows(self, group: list[Sequence]) -> Rows:
        decoded = self.decoded
        assert decoded is not None
        return decoded if len(group) == len(self._decoding) else Rows.of(group)
