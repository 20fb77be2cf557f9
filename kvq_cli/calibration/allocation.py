"""Choose the widths of transforms' fields so that the expected loss is least within a budget of bytes.

The *losses* of a stream are `[fields, 9]` float64: the expected loss of each field with codes of 0 to 8 bits, of all
groups together. A *profile* is the widths of the kept fields, descending; a group's codes of a token take 4 R bytes, R
its rate. Profiles whose fields do not fit into the words of their rate do not exist (`kvq_kernels.fields`).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice
from typing import NamedTuple, TypeAlias

import numpy as np
from kvq_kernels.fields import MAX_WIDTH, fits, rate
from numpy.typing import NDArray

from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import Profile, TransformSpec

Floats: TypeAlias = NDArray[np.float64]
Widths: TypeAlias = tuple[int, ...]
#: Profiles that are tried for each rate.
MAX_TRIED = 64
#: Pairs of profiles in a model, at most.
MENU = 8
#: Bits of width for each unit of a profile's rate, which are as many bytes of 8 components' codes.
RATE = 4


class Profiles:
    """The best profiles for the losses of a stream, or for the summed losses of several.

    bounds: `[rates]`, the least loss of descending widths within each rate, 1, 2, ..., up to `limit` or 8 bits for all
    fields; that of the best profile, unless its fields do not fit into words.
    """

    def __init__(self, losses: Floats, limit: int | None = None) -> None:
        self._losses = losses
        self._best: dict[int, Widths] = {}
        self._least = _least_losses(losses)
        rates = min(len(losses) * MAX_WIDTH // RATE, limit or sys.maxsize)
        self.bounds: Floats = self._least[0, MAX_WIDTH, RATE : RATE * rates + 1 : RATE]

    def best(self, most: int) -> Widths:
        """The profile of least loss among those with a rate of at most `most`: one field of one bit at least.

        Where wide fields leave room in most words, `MAX_TRIED` profiles of less loss may not fit: then it is that of
        the next lower rate, of which the same holds.
        """
        if most not in self._best:
            tried = islice(self._by_loss(RATE * most), MAX_TRIED)
            fitting = next((profile for profile in tried if fits(profile)), None)
            self._best[most] = fitting or self.best(most - 1)
        return self._best[most]

    def loss(self, profile: Widths) -> float:
        """The expected loss with a profile."""
        widths = [*profile, *[0] * (len(self._losses) - len(profile))]
        return float(self._losses[np.arange(len(widths)), widths].sum())

    def _by_loss(self, bits: int) -> Iterator[Widths]:
        """All descending widths of at most `bits` together, by loss: A* with the exact loss of the other fields."""
        queue: list[tuple[float, Widths]] = [(0.0, ())]
        while queue:
            _, widths = heapq.heappop(queue)
            field = len(widths)
            if field == len(self._losses):
                yield tuple(width for width in widths if width)
                continue
            most = min(bits - sum(widths), widths[-1] if widths else MAX_WIDTH)
            begun = sum(float(self._losses[at, width]) for at, width in enumerate(widths))
            for width in range(0 if widths else 1, most + 1):
                left = self._least[field + 1, width, bits - sum(widths) - width]
                heapq.heappush(queue, (begun + float(self._losses[field, width] + left), (*widths, width)))


def _least_losses(losses: Floats) -> Floats:
    """The least loss of the fields from each one on, `[fields + 1, 9, bits + 1]`: with widths of at most so many bits,
    descending, that are at most so many together."""
    fields, widths = losses.shape
    least = np.zeros((fields + 1, widths, fields * MAX_WIDTH + RATE + 1))
    for field in reversed(range(fields)):
        row = np.full(least.shape[2], np.inf)
        for width in range(widths):
            row[width:] = np.minimum(row[width:], losses[field, width] + least[field + 1, width, : len(row) - width])
            least[field, width] = row
    return least


class Choice(NamedTuple):
    """The profiles of some layers' keys and values, and their expected loss."""

    layers: tuple[int, ...]
    profiles: tuple[Widths, Widths]
    loss: float


class Allocation:
    """The profiles of a model's layers within a budget.

    layers: the losses of each layer's keys and values. groups: of keys and of values. budget: sum over layers, keys and
    values of groups times rate, at most. menu: different pairs of profiles, at most: a kernel is compiled for each.
    limits: of the rates of keys and of values.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Floats, Floats]],
        groups: tuple[int, int],
        budget: int,
        menu: int = MENU,
        limits: tuple[int, int] | None = None,
    ) -> None:
        if budget < sum(groups) * len(layers):
            raise ValueError(f"a budget of {budget} is too small for {len(layers)} layers of {sum(groups)} groups")
        self._layers, self._groups, self._budget = layers, groups, budget
        self._limits = limits or (None, None)
        self._price = self._find_price()
        self._clusters = self._merge(menu)

    def solve(self) -> list[tuple[Widths, Widths]]:
        """The profiles of each layer's keys and values. Where there are no more layers than the menu has pairs, their
        loss is the least of all; else layers that share a pair are found by merging those that lose least by it, then
        alternately choosing the best pairs for them and the best of these pairs for each layer."""
        best = self._choose(self._clusters)
        while True:
            choices = self._choose(self._regroup(best))
            if not sum(choice.loss for choice in choices) < sum(choice.loss for choice in best):
                break
            best = choices
        profiles = {layer: choice.profiles for choice in best for layer in choice.layers}
        return [profiles[layer] for layer in range(len(self._layers))]

    def _sides(self, layers: Sequence[int]) -> Iterator[tuple[Profiles, int]]:
        """(profiles for the summed losses, units of the budget for a rate of 1) of the keys and the values."""
        for side, (groups, limit) in enumerate(zip(self._groups, self._limits, strict=True)):
            summed = np.sum([self._layers[layer][side] for layer in layers], axis=0)
            yield Profiles(summed, limit), groups * len(layers)

    def _find_price(self) -> float:
        """The loss that is worth one unit of the budget: rates of least bound plus price are within it."""
        curves = [(p.bounds, units) for layer in range(len(self._layers)) for p, units in self._sides([layer])]

        def used(price: float) -> int:
            return sum(units * (1 + int((bounds + price * _costs(bounds, units)).argmin())) for bounds, units in curves)

        steepest = max(float(bounds[0]) for bounds, _ in curves)
        low, high = steepest * 1e-30, steepest * 2 + 1e-300
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if used(middle) > self._budget else (low, middle)
        return high

    def _merge(self, most: int) -> list[tuple[int, ...]]:
        """Merge layers into `most` clusters, each time the two whose common profiles lose least."""

        @cache
        def lost(layers: tuple[int, ...]) -> float:
            return sum(
                float((p.bounds + self._price * _costs(p.bounds, units)).min()) for p, units in self._sides(layers)
            )

        def added(pair: tuple[tuple[int, ...], ...]) -> float:
            return lost(tuple(sorted(pair[0] + pair[1]))) - lost(pair[0]) - lost(pair[1])

        clusters: list[tuple[int, ...]] = [(layer,) for layer in range(len(self._layers))]
        while len(clusters) > most:
            first, second = min(combinations(clusters, 2), key=added)
            clusters = [each for each in clusters if each not in (first, second)] + [tuple(sorted(first + second))]
        return clusters

    def _choose(self, clusters: Sequence[tuple[int, ...]]) -> list[Choice]:
        """The profiles of each cluster with the least sum of losses within the budget (dynamic programming)."""
        sides = [side for cluster in clusters for side in self._sides(cluster)]
        best = np.zeros(self._budget + 1)
        chosen = []
        for curve, units in sides:
            options: list[Widths] = []
            reached, rates = np.full(len(best), np.inf), np.zeros(len(best), dtype=np.int16)
            for most in range(1, len(curve.bounds) + 1):
                if (cost := units * most) > self._budget:
                    break
                options.append(curve.best(most))
                total = best[: len(best) - cost] + curve.loss(options[-1])
                better = total < reached[cost:]
                reached[cost:][better], rates[cost:][better] = total[better], most
            best = reached
            chosen.append((rates, options))
        left, found = self._budget, []
        for (curve, units), (rates, options) in zip(reversed(sides), reversed(chosen), strict=True):
            most = int(rates[left])
            left -= units * most
            found.append((options[most - 1], curve.loss(options[most - 1])))
        pairs = zip(found[::-2], found[-2::-2], strict=True)
        return [
            Choice(cluster, (keys, values), lost + other)
            for cluster, ((keys, lost), (values, other)) in zip(clusters, pairs, strict=True)
        ]

    def _regroup(self, choices: Sequence[Choice]) -> list[tuple[int, ...]]:
        """The layers for which each choice's profiles are the best, loss and price together."""
        clusters: list[list[int]] = [[] for _ in choices]
        for layer in range(len(self._layers)):
            sides = list(self._sides([layer]))
            totals = [
                sum(
                    curve.loss(profile) + self._price * units * rate(profile)
                    for (curve, units), profile in zip(sides, choice.profiles, strict=True)
                )
                for choice in choices
            ]
            clusters[int(np.argmin(totals))].append(layer)
        return [tuple(cluster) for cluster in clusters if cluster]


def _costs(bounds: Floats, units: int) -> Floats:
    return units * np.arange(1.0, len(bounds) + 1)


def model_profiles(
    losses: Mapping[tuple[int, str], Floats], spec: TransformSpec, shape: ModelShape
) -> dict[tuple[int, str], Profile]:
    """The profile of each stream (layer, kind) of a model. losses: of each stream, `[fields, 9]`."""
    groups = spec.groups("k", shape)[0], spec.groups("v", shape)[0]
    gains = "k" in spec.gains, "v" in spec.gains
    layers = [(losses[layer, "k"], losses[layer, "v"]) for layer in range(shape.layers)]
    if spec.allocate == "stream":
        limits = stream_rate(spec, "k", shape), stream_rate(spec, "v", shape)
        budget = shape.layers * sum(number * rate for number, rate in zip(groups, limits, strict=True))
    else:
        limits = None
        spent = shape.layers * sum(number * gain for number, gain in zip(groups, gains, strict=True))
        budget = (spec.byte_budget(shape) - spent) // RATE
    solved = Allocation(layers, groups, budget, limits=limits).solve()
    return {
        (layer, kind): Profile(widths, gain)
        for layer, pair in enumerate(solved)
        for kind, widths, gain in zip("kv", pair, gains, strict=True)
    }


def stream_rate(spec: TransformSpec, kind: str, shape: ModelShape) -> int:
    """The rate of a stream that has its bits for itself."""
    per_group = spec.stream_bytes(kind, shape) // spec.groups(kind, shape)[0]
    return (per_group - (kind in spec.gains)) // RATE
