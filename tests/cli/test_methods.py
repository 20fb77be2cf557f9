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
    entry = {"change": "sinks=8", "kl": -0.12, "low": -0.15, "high": -0.09, "bits": 0.25, "long_bits": 0.01}
    entry |= {"long_only": False, "model": "SmolLM2-135M", "windows": 6, "tokens": 1024, "long": 32768}
    more = {**entry, "change": "sinks=32", "long_only": True, "bits": 0.001, "long_bits": -0.004}
    monkeypatch.setattr("kvq_cli.methods.recommended._document", lambda: {"kivi": [entry, more]})
    text = kvq("methods", "kivi").stdout
    assert "6 windows of 1,024 tokens" in text
    bits = "(+0.25 bits at 1,024 tokens, +0.01 at 32,768)"
    assert f"on SmolLM2-135M, sinks=8: KL -12 % (95 %: -15 to -9) at equal bits {bits}\n" in text
    long_only = "KL -12 % (95 %: -15 to -9) at equal bits of 32,768 tokens (no more bits)"
    assert f"on SmolLM2-135M, sinks=32: {long_only}\n" in text
    assert json.loads(kvq("methods", "kivi", "--json").stdout)["recommended"] == [entry, more]
    assert "Better than the defaults" not in kvq("methods", "fp16").stdout


def test_recommended_settings_are_valid():
    for name in method_names():
        for each in recommended(name):
            assert build_parsed(f"{name}:{each.change}") != build(name)
            assert each.low <= each.kl <= each.high < 0


def test_unknown_method(fails):
    fails("methods", "nonsense", code=2, says="unknown method 'nonsense'; there are: channelkv, fp16")
