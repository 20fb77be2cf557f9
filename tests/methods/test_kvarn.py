"""Plans of KVarN and OScaR: sources, windows, cost, refusals."""

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def packed_bytes(plan, shape):
    x = torch.randn(1, shape.kv_heads, 128, shape.head_dim)
    return [stream.codec.encode(x).nbytes for stream in plan.kept]


@pytest.mark.parametrize(("options", "bits"), [({"bits": 4}, (4, 4)), ({"bits": 4, "value_bits": 2}, (4, 2))])
def test_tiles_take_the_bytes_of_the_presets_of_vllm(options, bits, shape_of):
    shape = shape_of(kv_heads=1, head_dim=128)
    plan = build("kvarn", **options).plan(0, shape, {})
    assert packed_bytes(plan, shape) == [128 * 128 * b // 8 + 3 * 128 * 2 for b in bits]
    assert build("kvarn", **options).nominal_bits == sum(bits) / 2
    assert (plan.keys.source, plan.values.source) == ("post_rope", "value")
    assert plan.keys.window == plan.values.window == Window(128, 0, 128)


def test_oscar_omni_packs_keys_and_values_together(shape):
    plan = build("oscar-omni").plan(0, shape, {})
    assert plan.keys.window == plan.values.window == Window(0, 0, 128)
    plan = build("oscar-omni", sinks=4, recent=64).plan(0, shape, {})
    assert plan.keys.window == plan.values.window == Window(4, 64, 32)
    norms = 4 * 128
    numbers = shape.kv_heads * 128 * shape.head_dim
    assert packed_bytes(plan, shape) == [numbers * 3 // 8 + norms, numbers * 3 // 8]  # 2 bits, ranges of 32 numbers


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kvarn", {"bits": 5}, "bits=5 is not one of"),
        ("kvarn", {"group": 4}, "group=4 must be at least 8"),
        ("oscar-omni", {"residual": 100}, "residual=100 is not a multiple of group=32"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(UsageError, match=message):
        build(name, **options)


@pytest.mark.parametrize("name", ["kvarn", "oscar-omni"])
def test_head_dims_without_a_hadamard_matrix_are_refused(name, shape_of):
    with pytest.raises(UsageError, match="Hadamard rotation of 72 channels"):
        build(name).plan(0, shape_of(head_dim=72), {})
