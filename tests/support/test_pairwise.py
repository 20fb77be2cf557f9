"""`parametrize_pairwise` covers every pair with fewer cases than the cross product, the same ones every time."""

import itertools

from pairwise import parametrize_pairwise

AXES = {"bits": [1, 2, 3, 4], "axis": ["token", "channel"], "dim": [64, 80, 96], "dtype": ["float16", "bfloat16"]}


def test_every_pair_of_values_occurs():
    names, cases = parametrize_pairwise(AXES).args
    assert names == "bits, axis, dim, dtype"
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))
    assert 12 <= len(cases) <= 16 < 48  # 4 x 3 is the lower bound


def test_the_choice_is_deterministic():
    assert parametrize_pairwise(AXES) == parametrize_pairwise(AXES)


def test_one_axis_may_set_several_arguments():
    names, cases = parametrize_pairwise({"a, b": [(1, 2), (3, 4)], "c": [5], "d": [6, 7]}).args
    assert names == "a, b, c, d" and set(cases) == {(1, 2, 5, 6), (1, 2, 5, 7), (3, 4, 5, 6), (3, 4, 5, 7)}
