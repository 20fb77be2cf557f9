"""Search the mixed configuration of least KL divergence within a budget of bits, or of fewest bits for a KL divergence.

1. All streams are served by klt, with bits given out by expected losses over the whole model, as klt itself does.
2. KL is measured with each stream alone compressed. The ratio of this to the expected loss of the stream corrects the
   scale of its losses: expected losses are of second order in the errors, and of the calibration text.
   Other methods are scaled by the same ratio, through errors of both on captured data. Where the KL of single streams
   would be lost in rounding, they are measured at fewer bits.
3. The choice of least predicted KL within the budget is found exactly, and measured. Steps 2 and 3 repeat.
4. Bits are exchanged between pairs of streams, least predicted loss first; what lowers the measured KL is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvq_cli.calibration.allocation import RATE
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.methods.registry import build, parse
from kvq_cli.methods.transform_specs import TransformSpec
from kvq_cli.tuning.menus import Anchor, Floats, Item, Stream, choose, klt_name, scaled
from kvq_cli.tuning.settings import TuneOptions
from kvq_cli.tuning.steps import UNCOMPRESSED, Steps

#: Least KL of a stream alone, as a share of the mean of all: measured differences below are noise.
_FLOOR = 1e-3
#: KL of a stream alone is measured at bits at which the mean of all streams is this many times the KL of rounding.
_CLEAR = 3
#: Share of a stream's mean bytes that a swap moves.
_SWAP = 0.1
#: Share of `--kl` that is aimed at, so that the measured KL is seldom above it.
_MARGIN = 0.95

#: One item for each stream.
Choice = Mapping[Stream, Item]


@dataclass(frozen=True)
class Tried:
    """A configuration and what it measured. bits: packed, per number. kl: nats per token."""

    step: str
    choice: Choice
    bits: float
    kl: float

    @property
    def names(self) -> dict[Stream, str]:
        """The method of each stream."""
        return _names(self.choice)


class Search:
    """tried: all configurations that were measured together; alone: the KL of each stream compressed alone."""

    def __init__(self, options: TuneOptions, steps: Steps, progress: Progress) -> None:
        self.options, self.steps, self.progress = options, steps, progress
        self.streams = steps.streams
        self.tried: list[Tried] = []
        self.alone: dict[Stream, list[Anchor]] = {stream: [] for stream in self.streams}
        self._numbers = steps.shape.kv_heads * steps.shape.head_dim
        name, given = parse(options.candidates[0])
        self._spec = cast("TransformSpec", build(name, **given).calibration(steps.shape))  # the first is klt
        self._groups = {kind: self._spec.groups(kind, steps.shape)[0] for kind in "kv"}
        self._expected: dict[Stream, Floats] = {}
        self._deadline = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")

    def run(self) -> Tried:
        """The best configuration."""
        self._expected = self.steps.expected_losses(self._spec)
        budget = self._bytes(self.options.budget)
        best = self._measure("klt, by expected loss", choose(self._menus(), budget))
        for number in range(1, self.options.rounds + 1):
            if self._late() or not self._measure_alone(self._measurable(best)):
                break
            if self.options.objective == "memory":
                budget = self._budget_for(_MARGIN * (self.options.kl or 0.0))
            choice = choose(self._menus(), budget)
            if any(_names(choice) == tried.names for tried in self.tried):
                break
            best = self._better(best, self._measure(f"choice {number}", choice))
        return self._swap(best)

    def curve(self) -> list[tuple[float, float]]:
        """Predicted (bits, KL) of the best choices from 0.5 to 4.25 bits; empty before streams were measured alone."""
        if not all(self.alone.values()):
            return []
        menus = self._menus()
        points, least = [], sum(min(item.cost for item in menu) for menu in menus.values())
        for quarter in range(2, 18):
            if self._bytes(quarter / 4) >= least:
                points.append((quarter / 4, sum(x.loss for x in choose(menus, self._bytes(quarter / 4)).values())))
        return points

    # -- steps -------------------------------------------------------------------------------------------------------

    def _swap(self, best: Tried) -> Tried:
        """Exchange bytes between pairs of streams while this lowers the measured KL."""
        # Rates by which two streams differ by the same bytes.
        unit = RATE * math.lcm(*self._groups.values())
        step = unit * max(1, round(_SWAP * self._bytes(best.bits) / len(self.streams) / unit))
        failed: set[tuple[Stream, Stream]] = set()
        for number in range(1, self.options.swaps + 1):
            found = self._next_swap(best.choice, step, failed)
            if found is None or self._late():
                break
            pair, choice = found
            better = self._better(best, self._measure(f"swap {number}", choice))
            if better is best:
                failed |= {pair}
            best = better
        return best

    def _next_swap(
        self, choice: Choice, step: int, failed: set[tuple[Stream, Stream]]
    ) -> tuple[tuple[Stream, Stream], dict[Stream, Item]] | None:
        """The untried pair (giver, taker), with the streams' new items, whose exchange of `step` bytes has the least
        predicted loss."""
        change: dict[Stream, dict[int, tuple[float, Item]]] = {}
        for stream, item in choice.items():
            if item.rate is None:
                continue
            by_cost = {each.cost: each for each in self._klt_menu(stream)}
            now = by_cost[item.cost]
            changed = {sign: by_cost.get(item.cost + sign * step) for sign in (-1, 1)}
            change[stream] = {sign: (new.loss - now.loss, new) for sign, new in changed.items() if new is not None}
        pairs = [
            (change[giver][-1][0] + change[taker][1][0], (giver, taker))
            for giver in change
            for taker in change
            if giver != taker and -1 in change[giver] and 1 in change[taker] and (giver, taker) not in failed
        ]
        if not pairs:
            return None
        giver, taker = min(pairs)[1]
        return (giver, taker), {**choice, giver: change[giver][-1][1], taker: change[taker][1][1]}

    def _measurable(self, best: Tried) -> Choice:
        """The choice of `best`, or, where rounding would drown the KL of streams alone, the best choice with fewer
        bits."""
        least = _CLEAR * self._rounding() * len(self.streams)
        return best.choice if best.kl >= least else choose(self._menus(), self._budget_for(least))

    def _rounding(self) -> float:
        """KL with nothing compressed: that of a cache in the model's dtype, and of other orders of additions."""
        return self.steps.kl(dict.fromkeys(self.streams, UNCOMPRESSED))[0]

    def _budget_for(self, target: float) -> int:
        """The least bytes whose predicted KL, times measured over predicted of the choice nearest to `target`, is
        `target` at most."""
        menus = self._menus()
        nearest = min(self.tried, key=lambda tried: abs(tried.kl - target))
        predicted = [{item.name: item.loss for item in menus[stream]}[name] for stream, name in nearest.names.items()]
        ratio = nearest.kl / max(sum(predicted), 1e-12)
        low, high = sum(min(item.cost for item in menu) for menu in menus.values()), self._bytes(8.0)
        while low < high:
            middle = (low + high) // 2
            enough = ratio * sum(item.loss for item in choose(menus, middle).values()) <= target
            low, high = (low, middle) if enough else (middle + 1, high)
        return low

    def _better(self, best: Tried, tried: Tried) -> Tried:
        if self.options.objective == "kl":
            return min(best, tried, key=lambda each: each.kl)
        target = self.options.kl or 0.0
        within = [each for each in (best, tried) if each.kl <= target]
        if not within:
            return min(best, tried, key=lambda each: each.kl)
        return min(within, key=lambda each: (each.bits, each.kl))  # swaps keep the bits

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    # -- measurements ------------------------------------------------------------------------------------------------

    def _measure(self, step: str, choice: Choice) -> Tried:
        """Calibrate what is missing, and measure the KL of a configuration."""
        names = _names(choice)
        self.steps.calibrate(names)
        kl, bits = self.steps.kl(names)
        self.tried.append(Tried(step, choice, bits, kl))
        return self.tried[-1]

    def _measure_alone(self, choice: Choice) -> bool:
        """Anchor each stream's predicted losses at the KL of the stream alone, without that of rounding. False, and no
        anchor, where time is over before all are measured: streams with and without one cannot be compared."""
        self.steps.calibrate(_names(choice))
        rounding = self._rounding()
        measured: dict[Stream, tuple[int, float]] = {}
        for done, (stream, item) in enumerate(choice.items()):
            self.progress("sensitivity", done, len(self.streams))
            if item.rate is None or any(anchor.rate == item.rate for anchor in self.alone[stream]):
                continue
            if self._late():
                return False
            others = dict.fromkeys(self.streams, UNCOMPRESSED)
            measured[stream] = item.rate, self.steps.kl({**others, stream: item.name})[0] - rounding
        self.progress("sensitivity", len(self.streams), len(self.streams))
        known = [kl for _, kl in measured.values()] + [anchor.kl for each in self.alone.values() for anchor in each]
        floor = max(_FLOOR * sum(known) / len(known), 1e-12)
        for stream, (rate, kl) in measured.items():
            self.alone[stream].append(Anchor(rate, max(kl, floor)))
        return True

    # -- menus -------------------------------------------------------------------------------------------------------

    def _menus(self) -> dict[Stream, list[Item]]:
        """What each stream can choose from, with losses in KL; klt alone before KL of the stream was measured."""
        return {stream: [*self._klt_menu(stream), *self._other_items(stream)] for stream in self.streams}

    def _klt_menu(self, stream: Stream) -> list[Item]:
        anchors, losses = self.alone[stream], self._expected[stream]
        losses = scaled(losses, anchors) if anchors else losses
        return [
            Item(self.klt(stream, rate), self._cost(stream, rate), float(losses[rate]), rate)
            for rate in range(1, len(losses))
        ]

    def _other_items(self, stream: Stream) -> list[Item]:
        """The other candidates; those without a measured error are left out where time is over."""
        items: list[Item] = []
        for anchor in self.alone[stream][:1]:
            klt = self.klt(stream, anchor.rate)
            for name in self.options.candidates[1:]:
                if self._late() and not (self.steps.has_error(stream, name) and self.steps.has_error(stream, klt)):
                    continue
                loss, cost = self.steps.error(stream, name)
                own = max(self.steps.error(stream, klt)[0], 1e-12)
                items.append(Item(name, cost, anchor.kl * loss / own))
        return items

    def klt(self, stream: Stream, rate: int) -> str:
        """The name of klt with this rate of a stream."""
        return klt_name(self.options.candidates[0], self._cost(stream, rate), self._numbers)

    def _cost(self, stream: Stream, rate: int) -> int:
        """Bytes of a token of a stream that klt serves with this rate."""
        return self._groups[stream[1]] * (RATE * rate + (stream[1] in self._spec.gains))

    def _bytes(self, bits: float) -> int:
        return int(bits * self._numbers * len(self.streams) / 8)


def _names(choice: Choice) -> dict[Stream, str]:
    return {stream: item.name for stream, item in choice.items()}
