"""The registry: names, options, and refusals that name valid values."""

import dataclasses

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.methods import registry
from kvq_cli.methods.base import Method


def test_built_in_methods_are_registered():
    assert {"fp16", "kivi", "temporalkv"} <= set(registry.method_names())


@pytest.mark.parametrize("name", registry.method_names())
def test_config_round_trips_through_json(name):
    method = registry.build(name)
    config = registry.to_config(method)
    assert config["name"] == name
    assert all(isinstance(value, int | float | str | bool | None) for value in config.values())
    assert registry.from_config(config) == method
    with pytest.raises(UsageError, match="no option 'colour'"):
        registry.from_config({**config, "colour": 1})


@pytest.mark.parametrize("name", registry.method_names())
def test_every_option_has_a_help_text(name):
    cls = registry.method_class(name)
    assert cls.summary
    for field in dataclasses.fields(cls):
        assert field.metadata["help"], field.name


def test_options_are_parsed_from_strings():
    kivi = registry.build("kivi", bits="4", recent="None", pre_rope="true", sinks="32")
    assert (kivi.bits, kivi.recent, kivi.pre_rope, kivi.sinks) == (4, None, True, 32)
    temporal = registry.build("temporalkv", outliers="0.01", fisher="off", hybrid="off", share="16")
    assert (temporal.outliers, temporal.fisher, temporal.hybrid, temporal.share) == (0.01, False, "off", 16)
    assert registry.build("temporalkv", outliers=0).outliers == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kiwi", {}, r"unknown method 'kiwi'; there are: .*fp16.*kivi.*temporalkv.*; did you mean 'kivi'\?"),
        ("kivi", {"grop": 3}, r"kivi has no option 'grop'; its options are: bits, group.*; did you mean 'group'\?"),
        ("fp16", {"bits": 2}, r"fp16 has no option 'bits'; it has no options"),
        ("kivi", {"bits": 5}, r"kivi: bits=5 is not one of 1, 2, 3, 4, 8"),
        ("kivi", {"bits": "two"}, r"kivi: bits='two' is not a whole number"),
        ("kivi", {"bits": True}, r"kivi: bits=True is not a whole number"),
        ("kivi", {"bits": 2.0}, r"kivi: bits=2.0 is not a whole number"),
        ("kivi", {"recent": "some"}, r"kivi: recent='some' is not a whole number or none"),
        ("squat", {"strength": "nan"}, r"squat: strength=nan is not a number"),
        ("squat", {"strength": float("inf")}, r"squat: strength=inf is not a number"),
        ("kvquant", {"outliers": "-inf"}, r"kvquant: outliers=-inf is not a number"),
        ("kivi", {"pre_rope": "maybe"}, r"kivi: pre_rope='maybe' is not on or off"),
        ("kivi", {"sinks": -1}, r"kivi: sinks=-1 must be at least 0"),
        ("kivi", {"sinks": 2**31}, r"sinks=2147483648 must be at most 1048576"),
        ("kivi", {"residual": 100}, r"residual=100 is not a multiple of group=32"),
        ("kivi", {"group": 1}, r"group=1 takes 34 bits per number .* larger group"),
        ("kivi", {"group": 2}, r"group=2 takes 18 bits"),
        ("temporalkv", {"bits": 3}, r"temporalkv: bits=3 is not one of 1, 2, 4 \(an 8-bit code stands for 8, 4 or 2"),
        ("temporalkv", {"hybrid": "both"}, r"hybrid=both is not one of layer, head, off"),
        ("temporalkv", {"outliers": 1.5}, r"outliers=1.5 must be at most 1"),
    ],
)
def test_refusals_name_valid_values(name, options, message):
    with pytest.raises(UsageError, match=message):
        registry.build(name, **options)


@pytest.mark.parametrize("text", ["kivi:sinks=8:sinks=4", "kivi:pre-rope=on:pre_rope=off", "kivi-4bit:bits=2"])
def test_an_option_is_given_once(text):
    with pytest.raises(UsageError, match="sets (sinks|pre_rope|bits) twice"):
        registry.parse(text)


def test_config_without_a_name_is_refused():
    with pytest.raises(UsageError, match="'name'"):
        registry.from_config({"bits": 2})


def test_duplicate_name_is_refused():
    class Second(Method):
        name = "kivi"

    with pytest.raises(ValueError, match="'kivi' is already taken"):
        registry.register(Second)


def test_method_without_calibration_is_refused(shape):
    with pytest.raises(UsageError, match="kivi needs no calibration"):
        registry.build("kivi").calibration(shape)
