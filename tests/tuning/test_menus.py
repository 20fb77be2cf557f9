"""Menus of streams and the choice within a budget, against trying everything."""

import itertools

import numpy as np
import pytest

from kvq_cli.errors import UsageError
from kvq_cli.tuning.menus import Anchor, Item, choose, klt_losses, klt_name, scaled

DRAW = np.random.default_rng(0)


def random_menus(streams: int, items: int) -> dict:
    return {
        (layer, "k"): [
            Item(f"{layer}.{n}", int(cost), float(loss))
            for n, (cost, loss) in enumerate(zip(DRAW.integers(1, 9, items), DRAW.random(items), strict=True))
        ]
        for layer in range(streams)
    }


@pytest.mark.parametrize("budget", [9, 12, 17, 40])
def test_the_choice_is_the_best_of_all_within_the_budget(budget):
    menus = random_menus(4, 5)
    within = [each for each in itertools.product(*menus.values()) if sum(item.cost for item in each) <= budget]
    if not within:
        with pytest.raises(UsageError, match="--budget"):
            choose(menus, budget)
        return
    chosen = choose(menus, budget)
    assert list(chosen) == list(menus) and sum(item.cost for item in chosen.values()) <= budget
    least = min(sum(item.loss for item in each) for each in within)
    assert sum(item.loss for item in chosen.values()) == pytest.approx(least)


def test_losses_of_a_stream_are_those_of_the_best_widths_of_each_rate():
    """A rate of R has 4 R bits of width; two fields of at most 8 bits, descending."""
    by_bits = np.sort(DRAW.random((2, 9)), axis=1)[:, ::-1]
    losses = klt_losses(by_bits[None])
    assert len(losses) == 5 and np.isinf(losses[0])
    for rate in range(1, 5):
        widths = [(a, b) for a in range(9) for b in range(a + 1) if a + b <= 4 * rate]
        assert losses[rate] == pytest.approx(min(by_bits[0, a] + by_bits[1, b] for a, b in widths))


def test_scaled_losses_meet_their_anchors_and_never_rise():
    expected = np.array([np.inf, 8.0, 4.0, 2.0, 1.0, 0.5])
    one = scaled(expected, [Anchor(2, 40.0)])
    np.testing.assert_allclose(one[1:], 10 * expected[1:])
    two = scaled(expected, [Anchor(4, 1.0), Anchor(2, 40.0)])
    np.testing.assert_allclose(two[[1, 2, 4, 5]], [80, 40, 1, 0.5])
    assert two[3] == pytest.approx(2 * 10**0.5)  # half way between factors 10 and 1
    assert (np.diff(scaled(expected, [Anchor(1, 1.0), Anchor(2, 9.0)])[1:]) <= 0).all()


def test_anchors_without_expected_loss_scale_nothing():
    """The variances of components that never change, as of a dead head, are 0."""
    expected = np.array([np.inf, 8.0, 4.0, 0.0, 0.0])
    with np.errstate(all="raise"):
        one = scaled(expected, [Anchor(2, 40.0), Anchor(4, 1e-6)])
        alone = scaled(np.zeros(4), [Anchor(2, 1e-6)])
    np.testing.assert_allclose(one, [np.inf, 80, 40, 0, 0])
    assert (alone == 0).all()


def test_names_of_klt_keep_their_options():
    assert klt_name("klt:join_keys=on", 28, 128) == "klt-1.75bit:join_keys=on"
    assert klt_name("klt", 67, 192) == "klt-2.7917bit"
