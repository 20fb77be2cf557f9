"""What is said about the size of a cache, against caches that were filled."""

import re

import pytest
from tiny_folder import tiny  # noqa: F401  # a fixture

from kvq_cli.attention.attach import attach
from kvq_cli.cli.cache_lines import cache_line, held_bytes, longer_text
from kvq_cli.evaluation.generation import generate_answers
from kvq_cli.methods.registry import build_parsed


def test_cache_line():
    report = {"bytes": 2**20, "fp16_bytes": 2**23, "measured_bits": 2.0, "nominal_bits": 2.0, "constant_bytes": 0}
    report["parts"] = {"recent": 2**20}
    assert (
        cache_line(report)
        == "cache: 1.0 MiB instead of 8.0 MiB in 16 bit (8.0x smaller), 2.00 bits per number (nominal 2)"
    )
    assert cache_line({**report, "constant_bytes": 512}).endswith("; shared by all sequences: 512 B")
    with_room = {**report, "fp16_bytes": 2**18, "measured_bits": 64.0, "parts": {"recent": 2**18, "unused": 3 * 2**18}}
    assert (
        cache_line(with_room, "; more")
        == "cache: 256.0 KiB instead of 256.0 KiB in 16 bit (the same size), 16.00 bits per number (nominal 2); more"
        "; room for more tokens: 768.0 KiB"
    )
    in_32_bits = {**report, "fp16_bytes": 2**19, "parts": {"raw": 2**20, "codes": 2}}
    assert "(2.0x larger: 1.0 MiB are raw)" in cache_line(in_32_bits)
    assert cache_line({**report, "bytes": 0}) == "cache: empty"


@pytest.mark.parametrize("name", ["kivi:group=8:residual=16", "zipcache:residual=16"])
def test_a_short_text_tells_the_size_of_a_longer_one(tiny, name):  # noqa: F811
    with attach(tiny.model, method := build_parsed(name)) as attached:

        def report(tokens):
            return generate_answers(tiny, attached, [([5, 6, 7, 8] * 64)[:tokens]], 1)[1]

        short = report(4).to_dict()
        said = longer_text(short, method, tiny)
        tokens, bits, smaller = re.fullmatch(
            r"; at (\d+) tokens ([\d.]+) bits, smaller than 16 bit from (\d+) tokens on", said
        ).groups()
        full, first, before = (report(n).to_dict() for n in (int(tokens), int(smaller), int(smaller) - 1))
        assert int(tokens) == tiny.context == 256
        assert bits == f"{full['measured_bits'] * held_bytes(full) / full['bytes']:.2f}"
        assert held_bytes(first) < first["fp16_bytes"] and held_bytes(before) >= before["fp16_bytes"]
        assert longer_text(full, method, tiny) == longer_text(short | {"tokens": 256}, method, tiny) == ""
        assert f"{said}; room for more tokens" in cache_line(short, said)


def test_caches_that_are_never_smaller_do_not_promise_it(tiny):  # noqa: F811
    """Of gear, with 8 numbers per head."""
    with attach(tiny.model, method := build_parsed("gear:group=8:residual=16")) as attached:
        report = generate_answers(tiny, attached, [[5, 6]], 2)[1].to_dict()
        assert re.fullmatch(r"; at 256 tokens 1[67][.]\d\d bits", longer_text(report, method, tiny))
    with attach(tiny.model, build_parsed("fp16")) as attached:
        report = generate_answers(tiny, attached, [[5, 6]], 2)[1].to_dict()
        assert longer_text(report, attached.method, tiny) == ""
