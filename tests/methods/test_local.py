"""`local`, the option of all methods: layers with a sliding window in 16 bits, or packed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvq_cli.benchmarking.accounting import account
from kvq_cli.benchmarking.shapes import SHAPES
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build, build_parsed, from_config, to_config

GEMMA = SHAPES["gemma3-270m"].model_shape()
#: Of every two layers one sees 128 tokens of 131,072, as in GPT-OSS.
OSS = ModelShape(4, 8, 2, 64, 512, "bfloat16", (128, None) * 2, 131072)


def described(plan) -> list:
    return [(stream.source, type(stream.codec), stream.window) for stream in plan.kept]


def test_layers_with_a_window_are_those_of_fp16():
    for method in (build("kivi", local="16bit"), build("turboquant", local="16bit")):
        for layer in range(OSS.layers):
            like = build("fp16") if OSS.window(layer) else method
            assert described(method.layer_plan(layer, OSS, {})) == described(like.plan(layer, OSS, {}))
    packed = described(build("kivi").plan(0, GEMMA, {}))
    assert all(described(build("kivi").layer_plan(layer, GEMMA, {})) == packed for layer in range(GEMMA.layers))


def test_auto_weighs_the_saving_of_the_longest_text():
    # Local layers hold 128 tokens each, the others 131,072: the saving is 128 x 14 / (131,200 x 2) = 0.7 %.
    assert build("kivi", bits=2).keeps_local(OSS)
    # Gemma's 15 local layers hold 512 tokens each, the 3 others 32,768: 7,680 x 14 / (105,984 x 2) = 51 %.
    assert not build("kivi", bits=2).keeps_local(GEMMA)
    assert not build("innerq", bits=3).keeps_local(GEMMA)


def test_auto_at_its_limits():
    # window x 14 / ((window + context) x 2) is 5 % where the context is 139 windows.
    at, below = (replace(OSS, windows=(1000, None) * 2, context=context) for context in (139_000, 139_001))
    assert not build("kivi", bits=2).keeps_local(at) and build("kivi", bits=2).keeps_local(below)
    longer = replace(OSS, context=2**31)
    assert build("kivi").keeps_local(replace(longer, windows=(1024, None) * 2))
    assert not build("kivi").keeps_local(replace(longer, windows=(1025, None) * 2))
    assert not build("kivi").keeps_local(replace(OSS, context=0))  # of a shape without its context
    assert not build("xquant", bits=16).keeps_local(OSS)  # there is nothing to save


def test_counted_bytes_are_those_of_both_kinds_of_layers():
    """Of kivi at 2 bits with windows of its own, against fp16 and kivi."""
    wide = replace(OSS, windows=())
    local, full = (account(build(name), replace(wide, layers=2), 8192) for name in ("fp16", "kivi"))
    held = account(build("fp16"), replace(OSS, layers=2, windows=(128,) * 2), 8192)
    assert held.bytes < local.bytes / 20
    assert account(build("kivi", local="16bit"), OSS, 8192).bytes == full.bytes + held.bytes


def test_configurations_of_before_are_unchanged():
    assert "local" not in to_config(build("klt"))
    assert to_config(build("klt", local="16bit"))["local"] == "16bit"
    assert from_config(to_config(build("klt", local="packed"))) == build("klt", local="packed")


@pytest.mark.parametrize(
    ("text", "shape", "says"),
    [
        ("xquant-cl:local=16bit", OSS, "local=16bit takes layers out of the sum over layers"),
        (
            "kivi:local=16bit",
            replace(OSS, windows=(128,) * 4),
            "kivi: local=16bit compresses no layer, all have a window",
        ),
        ("kivi:local=8bit", OSS, "local=8bit is not one of auto, 16bit, packed"),
        ("fp16:local=16bit", OSS, "fp16 has no option 'local'"),
    ],
)
def test_refusals(text, shape, says):
    with pytest.raises(UsageError, match=says):
        build_parsed(text).layer_plan(0, shape, {})


def test_methods_that_sum_over_layers_pack_them():
    assert not build("xquant-cl").keeps_local(OSS)
