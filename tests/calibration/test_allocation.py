"""Widths of fields against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kvq_kernels.fields import fits, rate

from kvq_cli.calibration.allocation import MENU, MENU_OF_LAYER, Allocation, model_profiles
from kvq_cli.calibration.profiles import Profiles
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.klt import KLT


def random_losses(draw: np.random.Generator, fields: int) -> np.ndarray:
    """Losses that fall with bits, of fields in any order."""
    return np.sort(draw.exponential(size=(fields, 9)), axis=1)[:, ::-1] * draw.exponential(size=(fields, 1))


def all_widths(fields: int) -> list[tuple[int, ...]]:
    """All descending widths of some of the fields that fit into words, in every field or fewer."""
    every = itertools.product(range(9), repeat=fields)
    kept = {tuple(width for width in widths if width) for widths in every if list(widths) == sorted(widths)[::-1]}
    return [widths for widths in kept if widths and fits(widths)]


def total(losses: np.ndarray, widths: tuple[int, ...]) -> float:
    return sum(losses[field, widths[field] if field < len(widths) else 0] for field in range(len(losses)))


@pytest.mark.parametrize("fields", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_profiles_of_each_rate_are_the_best_of_all(fields, seed):
    losses = random_losses(np.random.default_rng(seed), fields)
    profiles, every = Profiles(losses), all_widths(fields)
    assert len(profiles.bounds) == 2 * fields
    for most in range(1, 2 * fields + 1):
        best = profiles.best(most)
        assert rate(best) <= most and fits(best)
        least = min(total(losses, widths) for widths in every if rate(widths) <= most)
        assert profiles.loss(best) == pytest.approx(least) == pytest.approx(total(losses, best))
        assert profiles.bounds[most - 1] <= least + 1e-12


def best_pairs(layers: list, groups: tuple[int, int], budget: int) -> float:
    """The least loss of layers of 2 and 1 fields, each with any pair of profiles."""
    best = {0: 0.0}
    for keys, values in layers:
        reached: dict[int, float] = {}
        for first, second in itertools.product(all_widths(2), all_widths(1)):
            cost, loss = groups[0] * rate(first) + groups[1] * rate(second), total(keys, first) + total(values, second)
            for spent, before in best.items():
                if spent + cost <= budget:
                    reached[spent + cost] = min(reached.get(spent + cost, np.inf), before + loss)
        best = reached
    return min(best.values())


def solved(layers: list, groups: tuple[int, int], budget: int, menu: int) -> tuple[float, int]:
    """(loss, pairs of profiles) of an allocation, which is within the budget."""
    pairs = Allocation(layers, groups, budget, menu).solve()
    assert sum(groups[0] * rate(keys) + groups[1] * rate(values) for keys, values in pairs) <= budget
    losses = (total(one, a) + total(other, b) for (one, other), (a, b) in zip(layers, pairs, strict=True))
    return sum(losses), len(set(pairs))


@pytest.mark.parametrize("budget", [9, 13, 20, 36])
@pytest.mark.parametrize("seed", range(3))
def test_allocation_is_the_best_of_all(budget, seed):
    draw = np.random.default_rng(seed)
    layers = [(random_losses(draw, 2), random_losses(draw, 1)) for _ in range(3)]
    least = best_pairs(layers, (1, 2), budget)
    assert solved(layers, (1, 2), budget, 3)[0] == pytest.approx(least)


@pytest.mark.parametrize("seed", range(5))
def test_layers_that_share_a_pair_lose_as_little_as_any_that_do(seed):
    draw = np.random.default_rng(seed)
    layers = [(random_losses(draw, 2), random_losses(draw, 1)) for _ in range(4)]
    free, budget = best_pairs(layers, (1, 1), 16), 16
    summed = [(sum(keys for keys, _ in layers), sum(values for _, values in layers))]
    common, pairs = solved(layers, (1, 1), budget, 1)
    assert pairs == 1 and common == pytest.approx(best_pairs(summed, (1, 1), budget // 4))
    two, pairs = solved(layers, (1, 1), budget, 2)
    assert pairs <= 2 and free <= two <= common


def test_a_menu_of_two_serves_two_kinds_of_layers_without_loss():
    draw = np.random.default_rng(0)
    kinds = [(random_losses(draw, 2), random_losses(draw, 1)) for _ in range(2)]
    layers = [kinds[each] for each in (0, 1, 1, 0, 1, 0)]
    assert solved(layers, (1, 2), 6 * 9, 2)[0] <= 3 * best_pairs(kinds, (1, 2), 18) + 1e-9


def test_a_budget_below_one_byte_a_lane_is_refused():
    layers = [(np.ones((1, 9)), np.ones((1, 9)))]
    with pytest.raises(ValueError, match="budget of 2 is too small for 1 units of 3 groups"):
        Allocation(layers, (1, 2), 2)


SHAPE = ModelShape(layers=3, query_heads=2, kv_heads=2, head_dim=16, hidden_size=32, dtype="float32")


@pytest.mark.parametrize("options", [{}, {"join_values": True}, {"allocate": "stream"}])
@pytest.mark.parametrize("bits", [3.0, 4.25])
def test_profiles_of_a_model_are_within_its_bits(options, bits):
    spec = KLT(bits=bits, **options).calibration(SHAPE)
    draw = np.random.default_rng(0)
    streams = [(layer, kind) for layer in range(3) for kind in "kv"]
    losses = {
        (layer, kind): np.stack([random_losses(draw, width // 8) for _ in range(groups)])
        for layer, kind in streams
        for groups, width in [spec.groups(kind, SHAPE)]
    }
    losses[0, "k"] *= 100
    profiles = model_profiles(losses, spec, SHAPE)
    used = {stream: profiles[stream].nbytes for stream in streams}
    assert sum(used.values()) <= spec.byte_budget(SHAPE) and all(profile.gain for profile in profiles.values())
    assert all(len(profiles[stream].widths) == len(losses[stream]) for stream in streams)
    if options.get("allocate") == "stream":
        assert all(used[stream] <= spec.stream_bytes(stream[1], SHAPE) for stream in streams)
    else:
        assert used[0, "k"] > spec.stream_bytes("k", SHAPE)
    if options.get("join_values"):
        assert all(len({*profile.widths}) == 1 for profile in profiles.values())


@pytest.mark.parametrize("layers", [1, 5])
def test_heads_choose_from_a_menu_no_more_pairs_in_a_layer_than_it_may_have(layers):
    draw, heads = np.random.default_rng(layers), 6
    units = [(random_losses(draw, 3), random_losses(draw, 2)) for _ in range(layers * heads)]
    layer_of, budget = [unit // heads for unit in range(len(units))], 5 * len(units)
    pairs = Allocation(units, (1, 1), budget, layers=layer_of).solve()
    assert sum(rate(keys) + rate(values) for keys, values in pairs) <= budget
    assert len(set(pairs)) <= MENU
    for layer in range(layers):
        assert len(set(pairs[layer * heads : (layer + 1) * heads])) <= MENU_OF_LAYER
    own = [units[layer * heads : (layer + 1) * heads] for layer in range(layers)]
    summed = [(sum(keys for keys, _ in each), sum(values for _, values in each)) for each in own]
    losses = sum(total(k, a) + total(v, b) for (k, v), (a, b) in zip(units, pairs, strict=True))
    assert losses < solved(summed, (heads, heads), budget, layers)[0]
    assert solved(units, (1, 1), budget, MENU)[0] <= losses + 1e-12


def test_a_head_has_bits_for_a_share_of_its_layers_mean_loss():
    """Its loss on the calibration text may be that of a few tokens."""
    spec, falling = KLT(bits=6.0).calibration(SHAPE), 4.0 ** -np.arange(9)
    losses = {(layer, kind): np.tile(falling, (2, 2, 1)) for layer in range(3) for kind in "kv"}
    for x in losses.values():
        x[1] = 0
    profiles = model_profiles(losses, spec, SHAPE)
    for profile in profiles.values():
        most, least = map(sum, profile.widths)
        assert most >= least >= 0.5 * most
