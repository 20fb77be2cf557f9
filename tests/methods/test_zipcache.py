"""Plans of ZipCache: windows, bits, refusals."""

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def test_keys_and_values_are_packed_in_whole_chunks(shape):
    plan = build("zipcache").plan(0, shape, {})
    assert (plan.keys.source, plan.values.source) == ("post_rope", "value")
    assert plan.keys.window == plan.values.window == Window(0, 0, 100)
    assert build("zipcache", sinks=4, recent=20, residual=32).plan(0, shape, {}).keys.window == Window(4, 20, 32)


@pytest.mark.parametrize(("bits", "high", "nominal"), [(1, 2, 1.4), (2, 4, 2.8), (3, 4, 3.4), (4, 8, 5.6)])
def test_salient_tokens_have_the_next_packable_bits(shape, bits, high, nominal):
    method = build("zipcache", bits=bits)
    codec = method.plan(0, shape, {}).keys.codec
    assert (codec.low, codec.high) == (bits, high)
    assert method.nominal_bits == codec.nominal_bits == pytest.approx(nominal)
    assert build("zipcache", bits=bits, high=bits).nominal_bits == bits
    assert build("zipcache", bits=2, high="4", ratio="0.6").nominal_bits == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 8}, r"zipcache: bits=8 is not one of 1, 2, 3, 4 \(salient ones have more\)"),
        ({"high": 5}, r"high=5 is not one of None, 1, 2, 3, 4, 8"),
        ({"bits": 4, "high": 2}, r"zipcache: high=2 is less than the bits=4 of the other tokens"),
        ({"bits": 1, "high": 8}, r"bits=1 beside high=8: the difference must be 0, 1, 2, 3, 4 or 8 bits"),
        ({"ratio": 1.1}, r"ratio=1.1 must be at most 1"),
        ({"residual": 0}, r"residual=0 must be at least 1"),
    ],
)
def test_invalid_options_are_refused(shape, options, message):
    with pytest.raises(UsageError, match=message):
        build("zipcache", **options).plan(0, shape, {})
