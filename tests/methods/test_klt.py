"""Plans of KLT: sources, windows, cost, sizes, refusals; its options."""

import pytest
import torch

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build, parse
from kvq_cli.methods.window import Window
from kvq_cli.paths import artifact_folder


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 4])
@pytest.mark.parametrize("join_keys", [True, False])
def test_sources_windows_and_cost(bits, join_keys, shape, tensors_for):
    method = build("klt", bits=bits, join_keys=join_keys, recent=16)
    plan = method.plan(0, shape, tensors_for(method.calibration(shape), shape, []))
    assert (plan.keys.source, plan.values.source) == ("pre_rope", "value")
    assert plan.keys.window == plan.values.window == Window(8, 16, 8)
    assert (plan.keys.codec.joined, plan.values.codec.joined) == (join_keys, True)
    x = torch.randn(2, shape.kv_heads, 24, shape.head_dim)
    for stream in (plan.keys, plan.values):
        packed = stream.codec.encode(x)
        assert 8 * packed.nbytes / x.numel() == stream.codec.nominal_bits == bits
        assert packed.parts["codes"].tensor.dtype == torch.uint8
    assert method.nominal_bits == bits


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 4])
def test_even_allocations_stay_within_the_budget_and_waste_less_than_a_code_per_group(bits, head_dim, shape_of):
    shape = shape_of(3, 2, head_dim)
    spec = build("klt", bits=bits).calibration(shape)
    rows = [row for kind in "kv" for row in spec.first_choice(kind, shape)] * shape.layers
    assert spec.code_budget(shape) - len(rows) < sum(map(sum, rows)) <= spec.code_budget(shape)
    widths = [spec.groups(kind, shape)[1] for kind in "kv" for _ in spec.first_choice(kind, shape)] * shape.layers
    for row, width in zip(rows, widths, strict=True):
        assert sum(size * chunks for size, chunks in zip((1, 2, 4, 8), row, strict=True)) == width


def test_fractions_of_bits_are_parsed_and_name_folders():
    name, options = parse("klt-1.5bit:join_keys=on")
    assert (name, options) == ("klt", {"bits": 1.5, "join_keys": "on"})
    assert artifact_folder("reference", build(name, **options)).name == "klt-1.5bit-join-keys-on"
    assert artifact_folder("reference", build("klt", bits=2)).name == "klt-2bit"
    with pytest.raises(UsageError, match=r"klt: bits=8.5 must be at most 8"):
        build("klt", bits=8.5)
    with pytest.raises(UsageError, match=r"kivi: bits=1.5 is not a whole number"):
        build("kivi", bits=parse("kivi-1.5bit")[1]["bits"])


def test_missing_tensors_are_named(shape, tensors_for):
    method = build("klt")
    with pytest.raises(UsageError, match="klt needs an artifact"):
        method.plan(0, shape, {})
    tensors = tensors_for(method.calibration(shape), shape, [])
    del tensors["v.synthesis"]
    with pytest.raises(KvqError, match=r"no tensor layers.5.v.synthesis"):
        method.plan(5, shape, tensors)
