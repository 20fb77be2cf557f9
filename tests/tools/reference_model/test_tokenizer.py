"""The tokenizer of the reference model."""

import re

import pytest


@pytest.mark.parametrize("text", ["In 1984 it rained.", " naïve café — 日本 \n\n\ttabs", " rough-sun is: 1234567."])
def test_any_text_survives_a_round_trip(tokenizer, text):
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == tokenizer.token_to_id("<|bos|>") == 0
    assert tokenizer.decode(encoded.ids) == text


def test_every_digit_is_a_token(tokenizer):
    digits = [piece for piece in tokenizer.encode("of 1234567.").tokens if re.search(r"\d", piece)]
    assert digits == list("1234567")
