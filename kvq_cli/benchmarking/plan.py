"""What fits: weights and a method's cache within a budget of memory, counted from the tensors that there would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvq_cli.benchmarking.accounting import account, artifact_bytes
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method, ModelShape

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class Fit:
    """One method within the budget. Sizes in bytes; counts are whole numbers, 0 where nothing fits.

    weights, artifact, cache: of the model, of the method's constants, of the cache at the wanted context and batch.
    fits:         they and what is held back are no more than the budget.
    context:      the longest one at the wanted batch, at most `limit`. batch: the largest at the wanted context.
    """

    weights: int
    artifact: int
    cache: int
    fits: bool
    context: int
    batch: int

    def to_dict(self) -> dict:
        return asdict(self)


def parse_bytes(text: str, flag: str) -> int:
    """`80GB`, `16 GiB` or `2e9` as bytes; UsageError naming `flag`."""
    spaced = text.replace(" ", "").lower()
    number = spaced.rstrip("kmgtib")
    try:
        found = int(float(number) * _UNITS[spaced[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found < 1:
        raise UsageError(f"{flag} {text}: must be a size above 0 like 80GB, 24GiB or 512MB")
    return found


def fit(method: Method, shape: ModelShape, weights: int, limit: int, context: int, batch: int, room: int) -> Fit:
    """What of `room` bytes a model of `weights` bytes and the method's cache take, and how far it goes.

    limit: the longest context that the model was made for. UsageError where the method does not fit the
    shape.
    """
    artifact = sum(artifact_bytes(method, shape).values())
    left = room - weights - artifact

    def held(tokens: int, rows: int) -> int:
        return account(method, shape, tokens, rows).bytes

    cache = held(context, batch)
    longest = _largest(lambda tokens: held(tokens, batch) <= left, context, limit)
    # Rows are stored alike: all parts have one entry for each of them.
    row = held(context, 2) - held(context, 1)
    rows = max(0, (left - held(context, 1)) // row + 1) if left > 0 else 0
    return Fit(weights, artifact, cache, cache <= left, longest, rows)


def _largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest number up to `limit` for which `fits`, which holds up to some number; 0 where it does not for 1.

    Exact below 4096, above to within one part in 4096: a cache takes its room in steps.
    """
    low, high = 0, min(start, limit)
    while high < limit and fits(high):
        low, high = high, min(2 * high, limit)
    if fits(high):
        return high
    while high - low > max(1, low >> 12):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
