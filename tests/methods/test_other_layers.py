"""Methods on a shape of which some layers have no cache to compress: only the others are planned and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvq_cli.benchmarking.accounting import account, artifact_bytes, artifact_specs
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build, method_names

SHAPE = ModelShape(9, 8, 2, 64, 512, "float16", attention=(1, 3, 5, 8))
DENSE = replace(SHAPE, layers=4, attention=())


def plans(method):
    return {layer: method.plan(layer, SHAPE, artifact_specs(method, SHAPE, layer)) for layer in SHAPE.cached_layers}


def test_layers_without_a_cache_have_the_first_entry():
    assert list(DENSE.cached_layers) == [0, 1, 2, 3] and SHAPE.cached_layers == (1, 3, 5, 8)
    assert "".join(SHAPE.by_layer("abcd")) == "aaabacaad"


@pytest.mark.parametrize("name", method_names())
def test_as_many_bytes_as_a_model_of_these_layers_alone(name):
    method = build(name)
    assert account(method, SHAPE, 600, batch=2) == account(method, DENSE, 600, batch=2)
    assert artifact_bytes(method, SHAPE) == artifact_bytes(method, DENSE)


def test_first_and_last_layers_are_those_with_a_cache():
    exact = [
        layer
        for layer, plan in plans(build("turboquant", skip_layers=1)).items()
        if isinstance(plan.keys.codec, IdentityCodec)
    ]
    assert exact == [1, 8]
    with pytest.raises(UsageError, match="skip_layers=2 leaves none of 4 layers"):
        plans(build("turboquant", skip_layers=2))
    bits = [
        plan.keys.codec.nominal_bits for plan in plans(build("xquant", bits=2, base_layers=2, base_bits=8)).values()
    ]
    assert bits == [8, 8, 2, 2]
    parts = {layer: plan.cross_layer for layer, plan in plans(build("xquant-cl", base_layers=2)).items()}
    assert parts[1] is None and parts[3].first and not parts[5].first and not parts[5].last and parts[8].last


def test_mixed_names_a_method_for_each_layer_with_a_cache():
    method = build("mixed", bits=16, keys="klt-2bit kivi-4bit fp16 kivi-2bit", values="fp16")
    assert [method.component(layer, "k", SHAPE).name for layer in SHAPE.cached_layers] == [
        "klt",
        "kivi",
        "fp16",
        "kivi",
    ]
    assert method.calibration(SHAPE).parts(8) == method.calibration(DENSE).parts(3)
    with pytest.raises(UsageError, match="keys names 9 methods: give one, or one for each layer"):
        build("mixed", bits=16, keys=" ".join(["fp16"] * 9), values="fp16").calibration(SHAPE)
