"""Numbers that no option can have, of hundreds and thousands of digits, are refused in one line."""

from __future__ import annotations

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build, parse


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("option", ["bits", "outliers", "pre_rope", "sinks", "rotation"])
def test_integers_of_many_digits_are_refused(option, sign, digits):
    name = "gear" if option == "outliers" else "kivi"
    with pytest.raises(UsageError, match=f"method {name}: {option}=a number of [0-9,]+ bits is not "):
        build(name, **{option: sign * 10**digits})


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "1e400", "-" + "9" * 400])
@pytest.mark.parametrize("name, option", [("kivi", "bits"), ("gear", "outliers")])
def test_texts_of_many_digits_are_refused(name, option, text):
    with pytest.raises(UsageError, match=option):
        build(name, **{option: text})


def test_bits_of_many_digits_in_a_name_are_refused():
    for digits in (400, 5000):
        with pytest.raises(UsageError, match="unknown method 'kivi-9"):
            build(parse(f"kivi-{'9' * digits}bit")[0])
