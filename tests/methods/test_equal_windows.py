"""Equal windows: with the options that comparisons share, all methods keep the same tokens in full precision."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from random_artifacts import random_parts, tiny_model

from kvq_cli.cache.prompt_stream import new_stream
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.methods.base import StreamPlan
from kvq_cli.methods.mixed import PARTS
from kvq_cli.methods.registry import build_parsed, method_names
from kvq_cli.models import model_shape
from kvq_cli.papers.targets import targets

WINDOWS = {"sinks": "8", "recent": "32", "buffer": "32"}
#: Methods that have no `buffer` pack by one of the other two.
SHARED = {"sinks": "8", "recent": "32", "residual": "32", "buffer": "32", "group": "32"}
NO_BUFFER = {"gear", "kvarn", "zipcache", "xquant", "xquant-cl"}
LENGTHS = range(301)
EQUAL = [n if n < 40 else 40 + (n - 40) % 32 for n in LENGTHS]
#: Of more layers than XQuant-CL caches without differences. XQuant keeps X where that is smaller than keys and values.
MODELS = {
    "GQA": tiny_model(num_hidden_layers=5, head_dim=64, hidden_size=256),
    "small-input": tiny_model(num_hidden_layers=5, head_dim=64, hidden_size=128),
}
PARTS_OF_MIXED = [f"mixed:keys={part}-2bit:values={part}-2bit" for part in PARTS if part != "fp16"]


def streams(text: str, shared: Mapping[str, str], model: str) -> list[StreamPlan]:
    """The plans of the keys and the values of every layer."""
    method, shape = build_parsed(text, **shared), model_shape(MODELS[model])
    tensors = random_parts(method, MODELS[model])[1] if method.needs_artifact(shape) else {}
    plans = []
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        plan = method.plan(layer, shape, own)
        plans += [plan.keys, plan.values]
    return plans


def exact_tokens(plan: StreamPlan) -> list[int]:
    """How many tokens of a row of each length are in full precision."""
    if isinstance(plan.codec, IdentityCodec):
        return list(LENGTHS)
    splits = map(new_stream(plan).split, LENGTHS)
    return [tokens - last + first for tokens, (first, last) in zip(LENGTHS, splits, strict=True)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", [*method_names(), *PARTS_OF_MIXED])
def test_all_methods_keep_the_same_tokens_of_keys_and_of_values(text, model):
    """All methods but `fp16`, which packs none."""
    expected = list(LENGTHS) if text == "fp16" else EQUAL
    for plan in streams(text, SHARED, model):
        assert exact_tokens(plan) == expected


@pytest.mark.parametrize("name", method_names())
def test_methods_with_a_buffer_need_no_other_options(name):
    """As docs/COMPARE.md says."""
    equal = all(exact_tokens(plan) == EQUAL for plan in streams(name, WINDOWS, "GQA"))
    assert equal == (name not in {"fp16", *NO_BUFFER})


def test_targets_with_equal_windows_share_these_options():
    given = {target.options for target in targets().values() if "equal windows" in target.what}
    assert given == {" ".join(f"--set {option}={value}" for option, value in SHARED.items())}
