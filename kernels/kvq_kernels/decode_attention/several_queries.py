"""Several queries per row: how launches lay them out, and which tokens each of them sees.

A kv head's query rows are its query heads, with k queries each: row g k + j is query j of head g, as `[B, Q, k, D]` is
in memory. So kernels read k queries of G heads as they read one query of G k heads; only masks tell queries apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Most queries of a row in a call.
MAX_QUERIES = 16


def query_count(query: Tensor) -> int:
    """Queries per row and head of `[B, Q, D]` or `[B, Q, k, D]`."""
    return 1 if query.ndim == 3 else query.shape[2]


def padded_count(query: Tensor) -> int:
    """`query_count` as a power of two: few variants of the kernel are compiled."""
    return triton.next_power_of_2(query_count(query))


def query_rows(query: Tensor) -> Tensor:
    """`[B, Q padded_count, D]`, contiguous: the queries as heads, with zeros before each head's first query."""
    if query.ndim == 3:
        return query.contiguous()
    return torch.nn.functional.pad(query, (0, 0, padded_count(query) - query.shape[2], 0)).flatten(1, 2).contiguous()


def as_query_rows(shape: torch.Size, padded: int) -> tuple[int, int, int]:
    """Shape of `query_rows`, from the query's and its `padded_count`."""
    return shape[0], shape[1] * padded, shape[-1]


def query_blocks(group: int, queries: int, most: int) -> int:
    """Programs that share the group * queries rows of a kv head: the fewest with at most `most` rows each, if several
    queries make them more."""
    blocks = 1
    while blocks < queries and group * queries > most * blocks:
        blocks *= 2
    return blocks


@triton.jit
def seen_tokens(sight, M: tl.constexpr, QUERIES: tl.constexpr):
    """(first, end) int32 [M] of the tokens that each query row of a program sees. sight: number of the program's first
    row, length of the row's text, window, real queries before the newest; queries before these see what the oldest of
    them does."""
    older = QUERIES - 1 - (sight[0] + tl.arange(0, M)) % QUERIES
    end = sight[1] - tl.minimum(older, sight[3])
    return end - sight[2], end


@triton.jit
def finite_max(m, QUERIES: tl.constexpr):
    """Largest scores m, 0 where a query has seen no token yet: its weights are then 0, not NaN. One query sees all
    tokens that its programs read."""
    if QUERIES == 1:
        return m
    else:
        return tl.where(m == float("-inf"), 0.0, m)
