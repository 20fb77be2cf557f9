"""`kvq methods` lists the registered methods and their options."""

import json

from kvq_cli.methods.registry import build, method_names


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


def test_unknown_method(fails):
    fails("methods", "nonsense", code=2, says="unknown method 'nonsense'; there are: channelkv, fp16")
