"""`parametrize_pairwise` covers every pair with fewer cases than the cross product, the same ones every time."""

import itertools

from pairwise import parametrize_pairwise

AXES = {"bits": [1, 2, 3, 4], "axis": ["token", "channel"], "dim": [64, 80, 96], "dtype": ["float16", "bfloat16"]}


def test_every_pair_of_values_occurs():
    names, cases = parametrize_pairwise(**AXES).args
    assert names == list(AXES)
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))
    assert 12 <= len(cases) <= 16 < 48  # 4 x 3 is the lower bound


def test_the_choice_is_deterministic():
    assert parametrize_pairwise(**AXES) == parametrize_pairwise(**AXES)
