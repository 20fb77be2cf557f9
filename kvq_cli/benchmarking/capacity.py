"""The longest context and largest batch that fit into a memory budget beside the weights, for a method's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvq_cli.benchmarking.accounting import account, artifact_bytes
from kvq_cli.methods.base import Method, ModelShape


@dataclass(frozen=True)
class Capacity:
    """A method's memory use, and its limits within a budget. Sizes are in bytes.

    weights, artifact, cache: bytes of the model, the method's constants, and the cache at the given context and batch.
    fits: whether their sum is within the budget. context: the longest context at the given batch. batch: the largest
    batch at the given context. Both are 0 if nothing fits.
    """

    weights: int
    artifact: int
    cache: int
    fits: bool
    context: int
    batch: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def capacity(
    method: Method, shape: ModelShape, weights: int, limit: int, context: int, batch: int, budget: int
) -> Capacity:
    """Return what fits into `budget` bytes beside a model of `weights` bytes and the method's artifact.

    limit: the model's maximum context. UsageError if the method's options do not fit the shape.
    """
    artifact = sum(artifact_bytes(method, shape).values())
    available = budget - weights - artifact

    def cache_bytes(tokens: int, rows: int) -> int:
        return account(method, shape, tokens, rows).bytes

    cache = cache_bytes(context, batch)
    longest = _largest(lambda tokens: cache_bytes(tokens, batch) <= available, context, limit)
    # Bytes are linear in the batch: every tensor of the cache has one entry per sequence.
    per_row = cache_bytes(context, 2) - cache_bytes(context, 1)
    rows = max(0, (available - cache_bytes(context, 1)) // per_row + 1) if available > 0 else 0
    return Capacity(weights, artifact, cache, cache <= available, longest, rows)


def _largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Return the largest number up to `limit` for which the monotonic predicate `fits` is true, by bisection from
    `start`; 0 if it is false for 1. Exact below 4096, above to within 1/4096."""
    low, high = 0, min(start, limit)
    while high < limit and fits(high):
        low, high = high, min(2 * high, limit)
    if fits(high):
        return high
    while high - low > max(1, low >> 12):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
