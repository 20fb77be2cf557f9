"""`kvq methods` lists the registered methods and their options."""

import json

from kvq_cli.methods.recommended import recommended
from kvq_cli.methods.registry import build, build_parsed, method_names


def test_all_methods(kvq):
    found = json.loads(kvq("methods", "--json").stdout)
    assert [method["name"] for method in found] == method_names()
    table = kvq("methods").stdout
    assert all(method["caches"] in table and method["finds"] in table for method in found)


def test_listed_options_are_accepted(kvq):
    found = json.loads(kvq("methods", "kivi", "--json").stdout)
    defaults = {option["name"]: option["default"] for option in found["options"]}
    assert build("kivi", **defaults) == build("kivi")
    table = kvq("methods", "kivi").stdout
    assert all(option["help"] in table for option in found["options"])


def test_recommended_settings_are_printed(kvq, monkeypatch):
    entry = {"change": "sinks=8", "kl": -0.12, "low": -0.15, "high": -0.09, "bits": 2.6, "default_bits": 2.6}
    entry |= {"model": "SmolLM2-135M", "windows": 6, "tokens": 1024}
    more = {**entry, "change": "group=16:sinks=8", "bits": 3.1}
    monkeypatch.setattr("kvq_cli.methods.recommended._document", lambda: {"kivi": [entry, more]})
    text = kvq("methods", "kivi").stdout
    assert "6 windows of 1,024 tokens" in text
    assert "on SmolLM2-135M, sinks=8: KL -12 % (95 %: -15 to -9) at the same measured bits\n" in text
    assert "group=16:sinks=8: KL -12 % (95 %: -15 to -9) at the same measured bits (3.10 instead of 2.60)" in text
    assert json.loads(kvq("methods", "kivi", "--json").stdout)["recommended"] == [entry, more]
    assert "Better than the defaults" not in kvq("methods", "fp16").stdout


def test_recommended_settings_are_valid():
    for name in method_names():
        for each in recommended(name):
            assert build_parsed(f"{name}:{each.change}") != build(name)
            assert each.low <= each.kl <= each.high < 0


def test_unknown_method(fails):
    fails("methods", "nonsense", code=2, says="unknown method 'nonsense'; there are: channelkv, fp16")
