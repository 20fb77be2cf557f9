"""What can serve a stream, at what cost and predicted loss; and the choice of least loss within a budget, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvq_cli.calibration.profiles import Floats, Profiles
from kvq_cli.calibration.streams import Stream
from kvq_cli.errors import UsageError


@dataclass(frozen=True)
class Item:
    """One way to serve a stream. cost: bytes of a token, rounded up. loss: predicted KL in nats per token. rate: bytes
    of a lane, where klt with a free rate serves it."""

    name: str
    cost: int
    loss: float
    rate: int | None = None


def klt_losses(losses: Floats) -> Floats:
    """Expected loss of a stream's best profile of each rate, `[rates + 1]`; infinite at 0. losses: `[G, fields,
    9]`, by bits of each field."""
    return np.concatenate([[np.inf], Profiles(losses.sum(0)).bounds])


def klt_name(text: str, nbytes: int, numbers: int) -> str:
    """`klt:join_keys=on` with bits for so many bytes of `numbers` numbers: `klt-1.75bit:join_keys=on`. Bits are rounded
    up to 4 decimals, so that they give the same bytes."""
    name, colon, options = text.partition(":")
    return f"{name}-{-(-80_000 * nbytes // numbers) / 10_000:g}bit{colon}{options}"


@dataclass(frozen=True)
class Anchor:
    """The KL of a stream compressed alone, by klt of this rate."""

    rate: int
    kl: float


def scaled(expected: Floats, anchors: Sequence[Anchor]) -> Floats:
    """Expected losses times KL over expected loss at the anchors: between anchors, the factor's logarithm is
    interpolated, outside, the nearest anchor's is taken. The factor is 1 at an anchor whose expected loss is 0. A curve
    that falls with the rate stays as it is or falls."""
    known = sorted(anchors, key=lambda anchor: anchor.rate)
    factors = [np.log(anchor.kl / loss) if (loss := expected[anchor.rate]) > 0 else 0.0 for anchor in known]
    rates = np.arange(len(expected))
    curve = expected * np.exp(np.interp(rates, [anchor.rate for anchor in known], factors))
    return np.minimum.accumulate(curve)


def check_budget(budget: int, cheapest: int) -> None:
    """Raise UsageError for a budget below the cost of the cheapest choice. Both: bytes of a token."""
    if cheapest > budget:
        raise UsageError(
            f"--budget: {budget:,} bytes a token are too few, the smallest choice takes {cheapest:,}: raise it "
            f"{cheapest / max(budget, 1):.2f} times"
        )


def choose(menus: Mapping[Stream, Sequence[Item]], budget: int) -> dict[Stream, Item]:
    """One item per stream whose costs are `budget` at most and whose losses have the least sum of all such choices, by
    dynamic programming over the streams. UsageError where the cheapest items cost more."""
    check_budget(budget, sum(min(item.cost for item in menu) for menu in menus.values()))
    best = np.zeros(budget + 1)  # least loss of the streams so far, within so many bytes
    chosen = []
    for menu in menus.values():
        reached, index = np.full(budget + 1, np.inf), np.zeros(budget + 1, dtype=np.int32)
        for number, item in enumerate(menu):
            if item.cost > budget:
                continue
            total = best[: budget + 1 - item.cost] + item.loss
            better = total < reached[item.cost :]
            reached[item.cost :][better] = total[better]
            index[item.cost :][better] = number
        best = reached
        chosen.append(index)
    left, found = budget, {}
    for (stream, menu), index in zip(reversed(list(menus.items())), reversed(chosen), strict=True):
        found[stream] = menu[index[left]]
        left -= found[stream].cost
    return dict(reversed(found.items()))
