"""RULER's string match against hand-computed examples."""

import pytest

from kvq_cli.evaluation.ruler.scoring import clean, score

ALL = [
    (" 1234567.", ["1234567"], 1.0),
    ("The numbers are 11, 22 and 33", ["11", "33", "44", "55"], 0.5),
    ("alpha, BETA", ["Alpha", "beta", "gamma"], 2 / 3),
    ("", ["x"], 0.0),
    ("12345678", ["234567"], 1.0),  # a part of a longer number counts, as in RULER
    ("AB\x00CD", ["abcd"], 0.0),  # a control character becomes a line break, it does not vanish
]
PART = [
    ("It was Denver Broncos.", ["Broncos of Denver", "denver broncos"], 1.0),
    ("Carolina", ["Denver", "Broncos"], 0.0),
]


@pytest.mark.parametrize(("answer", "references", "expected"), ALL)
def test_string_match_all(answer, references, expected):
    assert score("string_match_all", answer, references) == pytest.approx(expected)


@pytest.mark.parametrize(("answer", "references", "expected"), PART)
def test_string_match_part(answer, references, expected):
    assert score("string_match_part", answer, references) == expected


def test_clean():
    assert clean("\x01 a\tb\x1f \n") == "a\nb"
