"""Which tokens each query of a prefill sees, as stored or in full precision, and masks for blocks of queries.

All of it is known on the host: nothing is read from the device, and a mask is made there once for all layers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.methods.window import Window

#: Added to scores of hidden tokens: finite, so that a query that sees no token of a tile gives no NaN but a result that
#: merging ignores.
HIDDEN = -1e30
#: Sliding window of layers without one: longer than any text.
UNLIMITED = 1 << 40


class Edge(NamedTuple):
    """The first token that a query sees as new; earlier ones it sees as stored.

    fixed: the tokens that all queries see as stored; None: those that are packed when the query is the newest token.
    """

    window: Window
    fixed: int | None

    def at(self, query: int) -> int:
        """Of the query with this number."""
        seen = self.window.sinks + self.window.packed(query + 1) if self.fixed is None else self.fixed
        return min(seen, query + 1)

    def of(self, queries: Tensor) -> Tensor:
        """Of each of the queries, int64."""
        if self.fixed is not None:
            return (queries + 1).clamp_(max=self.fixed)
        window = self.window
        packed = (queries + (1 - window.sinks - window.recent)).clamp_(min=0)
        packed = packed.div_(window.flush, rounding_mode="floor").mul_(window.flush)
        return torch.minimum(packed + window.sinks, queries + 1)

    @property
    def start(self) -> int:
        """The first query from which on the edge moves by `period` tokens for as many queries."""
        return 0 if self.fixed is not None else max(0, self.window.sinks + self.window.recent - 1)

    @property
    def period(self) -> int:
        """See `start`."""
        return 1 if self.fixed is not None else self.window.flush

    def moved(self, tokens: int, lowest: int, highest: int) -> Edge:
        """The edge among tokens [lowest, highest) counted from `tokens` on."""
        return self if self.fixed is None else Edge(self.window, min(max(self.fixed, lowest), highest) - tokens)


class Run(NamedTuple):
    """Tokens whose key and value queries see as stored or new: [start, stop), numbers of one query or int64 tensors of
    several. Neither start nor stop decreases from query to query."""

    key_stored: bool
    value_stored: bool
    start: Any
    stop: Any


class Sight(NamedTuple):
    """What queries see: the `sliding` newest tokens, keys and values before their edges as stored, others as new."""

    keys: Edge
    values: Edge
    sliding: int

    def first(self, query: int) -> int:
        """The first token that a query sees; may be negative."""
        return query + 1 - self.sliding

    def runs(self, query: int) -> list[Run]:
        """All tokens that a query sees."""
        key, value, low = self.keys.at(query), self.values.at(query), self.first(query)
        return [
            Run(True, True, low, min(key, value)),
            Run(True, False, max(low, value), key),
            Run(False, True, max(low, key), value),
            Run(False, False, max(low, key, value), query + 1),
        ]

    def runs_of(self, queries: Tensor) -> list[Run]:
        """All tokens that each of the queries sees."""
        key, value, low = self.keys.of(queries), self.values.of(queries), queries + (1 - self.sliding)
        return [
            Run(True, True, low, torch.minimum(key, value)),
            Run(True, False, torch.maximum(low, value), key),
            Run(False, True, torch.maximum(low, key), value),
            Run(False, False, torch.maximum(low, torch.maximum(key, value)), queries + 1),
        ]


class Part(NamedTuple):
    """Tokens [start, stop) of the run of this number, which some queries of a block see."""

    run: int
    key_stored: bool
    value_stored: bool
    start: int
    stop: int


def block_mask(sight: Sight, begin: int, end: int, parts: list[Part], device: torch.device) -> Tensor:
    """The mask of queries [begin, end) for the tokens of the parts.

    The masks of most blocks are alike but for where the blocks begin. So tokens and queries are counted from `back` on,
    and few masks serve all blocks, layers and steps.
    """
    lowest, highest = min(part.start for part in parts), max(part.stop for part in parts)
    start = max(sight.keys.start, sight.values.start)
    period = math.lcm(sight.keys.period, sight.values.period)
    back = max(0, begin - start) // period * period
    keys, values = (edge.moved(back, lowest, highest) for edge in (sight.keys, sight.values))
    moved = Sight(keys, values, sight.sliding)
    places = tuple((part.run, part.start - back, part.stop - back) for part in parts)
    return _mask(moved, begin - back, end - back, places, device)


@lru_cache(maxsize=64)
@changes_stored_tensors
def _mask(sight: Sight, begin: int, end: int, parts: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """0 where queries [begin, end) see a token of the parts, else `HIDDEN`: float32 `[queries, tokens]`."""
    hidden = hidden_tokens(sight, begin, end, parts, device)
    return torch.zeros(hidden.shape, dtype=torch.float32, device=device).masked_fill_(hidden, HIDDEN)


def hidden_tokens(
    sight: Sight, begin: int, end: int, parts: tuple[tuple[int, int, int], ...], device: torch.device
) -> Tensor:
    """Whether each of the queries [begin, end) does not see a token of the parts (number of a run, start, stop): bool
    `[queries, tokens]`."""
    runs, hidden = sight.runs_of(torch.arange(begin, end, device=device)), []
    for number, start, stop in parts:
        run, tokens = runs[number], torch.arange(start, stop, device=device)
        hidden.append((tokens < run.start.unsqueeze(1)) | (tokens >= run.stop.unsqueeze(1)))
    return torch.cat(hidden, dim=1)
