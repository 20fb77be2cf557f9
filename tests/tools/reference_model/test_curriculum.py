"""Batches depend on the step alone, and weights are high only for predictable tokens."""

import random

import numpy as np
from reference_model import curriculum


def test_a_step_always_has_the_same_data(make_curriculum):
    for step in (0, 3, 4, 9):
        first, second = make_curriculum().batch(step), make_curriculum().batch(step)
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
        assert first[0].shape[1] == first[1].shape[1] + 1


def test_weighted_tokens_of_repeats_are_copies():
    ids, weights = curriculum.repeats(random.Random(0), 200, 4000, 4096, 3)
    weighted = list(np.flatnonzero(weights == 1.0))
    assert weighted
    pairs = [tuple(ids[position - 1 : position + 1]) for position in range(1, len(ids))]
    # A weighted token and the token before it have occurred together before.
    assert all(pairs[position - 1] in pairs[: position - 1] for position in weighted)
