"""Choose the widths of transforms' fields so that a model's expected loss is least within a budget of bytes.

A *unit* has a pair of profiles, for its keys and its values: a kv head, or a layer whose keys or values share one
transform. Losses and profiles: see `profiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from kvq_kernels.fields import rate

from kvq_cli.calibration.profiles import RATE, Floats, Profiles, Widths
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.transform_specs import Profile, TransformSpec

#: Pairs of profiles in a model, at most, and among the heads of a layer: one kernel is compiled for each pair, and one
#: launched for each in a layer.
MENU, MENU_OF_LAYER = 8, 3
#: Weight of a layer's mean in the losses of its heads, which are estimated from few tokens: by its own loss alone, a
#: head with a low loss on the calibration text has too few bits for other text (docs/METHOD.md).
HEAD_PRIOR = 0.1


class Choice(NamedTuple):
    """The profiles of some units' keys and values, and their expected loss."""

    units: tuple[int, ...]
    profiles: tuple[Widths, Widths]
    loss: float


class Allocation:
    """The profiles of a model's units within a budget.

    units: the losses of each unit's keys and values. groups: of channels with a transform, of a unit's keys and values.
    budget: sum over units, keys and values of groups times rate, at most. menu: different pairs of profiles, at most.
    limits: of the rates of keys and of values. layers: of each unit; a layer has at most `MENU_OF_LAYER` different
    pairs. None: each unit is a layer.
    """

    def __init__(
        self,
        units: Sequence[tuple[Floats, Floats]],
        groups: tuple[int, int],
        budget: int,
        menu: int = MENU,
        limits: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        if budget < sum(groups) * len(units):
            raise ValueError(f"a budget of {budget} is too small for {len(units)} units of {sum(groups)} groups")
        self._units, self._groups, self._budget = units, groups, budget
        self._limits = limits or (None, None)
        own: dict[int, list[int]] = {}
        for unit, layer in enumerate(range(len(units)) if layers is None else layers):
            own.setdefault(layer, []).append(unit)
        self._layers = list(own.values())
        self._alone = [list(self._sides([unit])) for unit in range(len(units))]
        self._price = self._find_price()
        self._menu = menu

    def solve(self) -> list[tuple[Widths, Widths]]:
        """The profiles of each unit's keys and values. Where there are no more units than the menu has pairs, their
        loss is the least of all; else a menu is chosen from the best profiles of single units, then alternately the
        best pairs for the units that share one and the best of these pairs for each unit."""
        if len(self._units) <= self._menu:
            clusters: list[tuple[int, ...]] = [(unit,) for unit in range(len(self._units))]
        else:
            clusters = self._shared(self._cost_of(self._best_menu()))
        best = self._choose(clusters)
        if any(sum(bool({*layer} & {*choice.units}) for choice in best) > MENU_OF_LAYER for layer in self._layers):
            best = self._choose(self._regroup(best))
        while True:
            choices = self._choose(self._regroup(best))
            if not sum(choice.loss for choice in choices) < sum(choice.loss for choice in best):
                break
            best = choices
        profiles = {unit: choice.profiles for choice in best for unit in choice.units}
        return [profiles[unit] for unit in range(len(self._units))]

    def _sides(self, units: Sequence[int]) -> Iterator[tuple[Profiles, int]]:
        """(profiles for the summed losses, what a rate of 1 takes of the budget) of the keys and the values."""
        for side, (groups, limit) in enumerate(zip(self._groups, self._limits, strict=True)):
            summed = np.sum([self._units[unit][side] for unit in units], axis=0)
            yield Profiles(summed, limit), groups * len(units)

    def _find_price(self) -> float:
        """The loss that is worth 1 of the budget: rates of least bound plus price are within it."""
        curves = [(p.bounds, taken) for sides in self._alone for p, taken in sides]

        def used(price: float) -> int:
            return sum(taken * (1 + _cheapest(bounds, price * taken)) for bounds, taken in curves)

        steepest = max(float(bounds[0]) for bounds, _ in curves)
        low, high = steepest * 1e-30, steepest * 2 + 1e-300
        for _ in range(100):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if used(middle) > self._budget else (low, middle)
        return high

    def _best_menu(self) -> list[tuple[Widths, Widths]]:
        """Pairs of single units' best profiles at the price, one after another those with which units lose least; then
        each is exchanged for a better one as long as there is one."""
        found: tuple[list[Widths], list[Widths]] = [], []
        for sides in self._alone:
            for (curve, taken), profiles in zip(sides, found, strict=True):
                profiles.append(curve.best(1 + _cheapest(curve.bounds, self._price * taken)))
        pairs = list(product(dict.fromkeys(found[0]), dict.fromkeys(found[1])))
        costs, menu = self._cost_of(pairs), list[int]()
        least = np.full(len(costs), np.inf)
        for _ in range(min(self._menu, len(pairs))):
            menu.append(int(np.minimum(costs, least[:, None]).sum(0).argmin()))
            least = np.minimum(least, costs[:, menu[-1]])
        slot, kept = 0, 0
        while kept < len(menu):
            others = costs[:, menu[:slot] + menu[slot + 1 :]].min(1, initial=np.inf)
            totals = np.minimum(costs, others[:, None]).sum(0)
            better = int(totals.argmin())
            kept = 0 if totals[better] < totals[menu[slot]] * (1 - 1e-12) else kept + 1
            if not kept:
                menu[slot] = better
            slot = (slot + 1) % len(menu)
        return [pairs[index] for index in menu]

    def _cost_of(self, pairs: Sequence[tuple[Widths, Widths]]) -> Floats:
        """Loss and price of each unit with each pair, `[units, pairs]`."""
        costs = []
        for sides in self._alone:
            of_side = []
            for (curve, taken), profiles in zip(sides, zip(*pairs, strict=True), strict=True):
                each = {widths: curve.loss(widths) + self._price * taken * rate(widths) for widths in {*profiles}}
                of_side.append([each[widths] for widths in profiles])
            costs.append(np.sum(of_side, axis=0))
        return np.array(costs)

    def _shared(self, costs: Floats) -> list[tuple[int, ...]]:
        """The units for which each of some pairs is the best, no more pairs in a layer than allowed. costs: `[units,
        pairs]`."""
        clusters: list[list[int]] = [[] for _ in range(costs.shape[1])]
        most = min(MENU_OF_LAYER, costs.shape[1])
        for layer in self._layers:
            own = costs[layer]
            allowed = min(combinations(range(costs.shape[1]), most), key=lambda some: own[:, some].min(1).sum())
            for unit, index in zip(layer, own[:, allowed].argmin(1), strict=True):
                clusters[allowed[int(index)]].append(unit)
        return [tuple(cluster) for cluster in clusters if cluster]

    def _choose(self, clusters: Sequence[tuple[int, ...]]) -> list[Choice]:
        """The profiles of each cluster with the least sum of losses within the budget (dynamic programming)."""
        sides = [side for cluster in clusters for side in self._sides(cluster)]
        best = np.zeros(self._budget + 1)
        chosen = []
        for curve, taken in sides:
            options: list[Widths] = []
            reached, rates = np.full(len(best), np.inf), np.zeros(len(best), dtype=np.int16)
            for most in range(1, len(curve.bounds) + 1):
                if (cost := taken * most) > self._budget:
                    break
                options.append(curve.best(most))
                total = best[: len(best) - cost] + curve.loss(options[-1])
                better = total < reached[cost:]
                reached[cost:][better], rates[cost:][better] = total[better], most
            best = reached
            chosen.append((rates, options))
        left, found = self._budget, []
        for (curve, taken), (rates, options) in zip(reversed(sides), reversed(chosen), strict=True):
            most = int(rates[left])
            left -= taken * most
            found.append((options[most - 1], curve.loss(options[most - 1])))
        pairs = zip(found[::-2], found[-2::-2], strict=True)
        return [
            Choice(cluster, (keys, values), lost + other)
            for cluster, ((keys, lost), (values, other)) in zip(clusters, pairs, strict=True)
        ]

    def _regroup(self, choices: Sequence[Choice]) -> list[tuple[int, ...]]:
        """The units for which each choice's profiles are the best."""
        return self._shared(self._cost_of([choice.profiles for choice in choices]))


def _cheapest(bounds: Floats, price: float) -> int:
    """The index of the least bound plus price, which is that of a rate of 1."""
    return int((bounds + price * np.arange(1.0, len(bounds) + 1)).argmin())


def model_profiles(
    losses: Mapping[tuple[int, str], Floats], spec: TransformSpec, shape: ModelShape
) -> dict[tuple[int, str], Profile]:
    """The profile of each stream (layer, kind) of a model. losses: of each stream's groups, `[G, fields, 9]`."""
    groups = spec.groups("k", shape)[0], spec.groups("v", shape)[0]
    units, layers = list[tuple[Floats, Floats]](), list[int]()
    by_head = groups[0] == groups[1]
    losses = {stream: x + HEAD_PRIOR * (x.mean(0, keepdims=True) - x) for stream, x in losses.items()}
    for layer in shape.cached_layers:
        pairs = zip(losses[layer, "k"], losses[layer, "v"], strict=True) if by_head else None
        units += pairs or [(losses[layer, "k"].sum(0), losses[layer, "v"].sum(0))]
        layers += [layer] * (len(units) - len(layers))
    if spec.allocate == "stream":
        limits = stream_rate(spec, "k", shape), stream_rate(spec, "v", shape)
        budget = len(shape.cached_layers) * sum(number * rate for number, rate in zip(groups, limits, strict=True))
    else:
        limits = None
        spent = len(shape.cached_layers) * sum(
            number * (kind in spec.gains) for number, kind in zip(groups, "kv", strict=True)
        )
        budget = (spec.byte_budget(shape) - spent) // RATE
    solved = Allocation(units, (1, 1) if by_head else groups, budget, limits=limits, layers=layers).solve()
    found: dict[tuple[int, str], list[Widths]] = {}
    for layer, pair in zip(layers, solved, strict=True):
        for kind, widths, number in zip("kv", pair, groups, strict=True):
            found.setdefault((layer, kind), []).extend([widths] * (1 if by_head else number))
    return {(layer, kind): Profile(tuple(widths), kind in spec.gains) for (layer, kind), widths in found.items()}


def stream_rate(spec: TransformSpec, kind: str, shape: ModelShape) -> int:
    """The rate of a stream that has its bits for itself."""
    per_group = spec.stream_bytes(kind, shape) // spec.groups(kind, shape)[0]
    return (per_group - (kind in spec.gains)) // RATE
