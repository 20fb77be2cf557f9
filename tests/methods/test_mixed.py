"""Mixed: streams served by other methods' plans, windows of all, bits, names, refusals."""

import pytest
import torch

from kvq_cli.benchmarking.accounting import account
from kvq_cli.errors import UsageError
from kvq_cli.methods import mixed
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build, from_config, to_config
from kvq_cli.methods.window import Window
from kvq_cli.paths import artifact_folder


def test_each_stream_has_the_plan_of_its_method(shape, tensors_for):
    method = build("mixed", bits=16, keys="kivi-4bit:group=64 klt-1bit", values="temporalkv-2bit fp16", recent=16)
    temporal, klt = build("temporalkv", bits=2), build("klt", bits=1)
    first = tensors_for(temporal.calibration(shape), shape, [0] * shape.kv_heads)
    second = tensors_for(klt.calibration(shape), shape, [])
    plans = [
        method.plan(0, shape, {name: x for name, x in first.items() if name.startswith("v.")}),
        method.plan(1, shape, {name: x for name, x in second.items() if name.startswith("k.")}),
    ]
    assert [plan.keys.source for plan in plans] == ["post_rope", "pre_rope"]
    assert plans[0].keys.window == Window(8, 16, 64)
    assert plans[1].keys.window == plans[0].values.window == Window(8, 16, 16)
    x = torch.randn(1, shape.kv_heads, 64, shape.head_dim, generator=torch.Generator().manual_seed(0)).half()
    alone = [
        build("kivi", bits=4, group=64).plan(0, shape, {}).keys.codec,
        klt.plan(1, shape, second).keys.codec,
        temporal.plan(0, shape, first).values.codec,
    ]
    for codec, expected in zip((plans[0].keys.codec, plans[1].keys.codec, plans[0].values.codec), alone, strict=True):
        assert torch.equal(codec.decode(codec.encode(x), x.dtype), expected.decode(expected.encode(x), x.dtype))


def test_bits_are_the_mean_of_all_streams(shape):
    method = build("mixed", bits=4.5, keys="klt-1bit klt-3bit", values="klt-6bit")
    assert method.nominal_bits == 4
    # Whole bytes of 4 lanes, and one of the gain: 5 and 21 of 8 and 24 bytes of a head's keys, 45 of 48 of values.
    assert account(method, shape, 1024).packed_bits == pytest.approx((5 + 21 + 2 * 45) / 4 / 8)
    with pytest.raises(UsageError, match="its methods take 4 bits on average, more than bits=3"):
        build("mixed", bits=3, keys="klt-1bit klt-3bit", values="klt-6bit")


def test_names_without_bits_have_the_bits_of_the_whole(shape):
    assert build("mixed", bits=1.5).component(1, "k") == build("klt", bits=1.5)
    assert build("mixed", bits=3, keys="kivi", values="kivi").component(0, "v").bits == 3


@pytest.mark.parametrize("numbers", [128, 192, 1024])
def test_rounded_bits_give_the_same_number_of_bytes(numbers, shape_of):
    from kvq_cli.tuning.menus import klt_name

    shape = shape_of(2, numbers // 64, 64)
    for nbytes in range(5, numbers + 1):
        method = build("mixed", bits=8, keys=klt_name("klt:join_keys=on", nbytes, numbers)).component(0, "k")
        assert method.join_keys and method.calibration(shape).stream_bytes("k", shape) == nbytes


def test_the_artifact_that_it_needs(shape):
    assert build("mixed").needs_artifact(shape)
    assert not build("mixed", bits=16, keys="kivi-2bit", values="fp16").needs_artifact(shape)


def test_configuration_and_folder():
    method = build("mixed", bits=2.25, keys="klt-1.5bit klt-3bit", values="klt-2.25bit")
    assert from_config(to_config(method)) == method
    assert artifact_folder("reference", build("mixed", bits=2.25)).name == "mixed-2.25bit"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keys": "xquant"}, "'xquant' cannot serve a single stream; valid: fp16, kivi"),
        ({"keys": "mixed"}, "'mixed' cannot serve"),
        ({"keys": ""}, "name one method at least"),
        ({"values": "klt:sinks=3"}, "set sinks once for all streams"),
        ({"keys": "klt:local=16bit"}, "set local once for all streams"),
        ({"values": "klt-9bit"}, "bits=9.0 must be at most 8"),
        ({"values": "kivi-5bit"}, "kivi: bits=5 is not one of"),
    ],
)
def test_names_that_cannot_be_used_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        build("mixed", **options)


def test_as_many_names_as_layers(shape):
    with pytest.raises(UsageError, match="keys names 3 methods: give one, or one for each layer"):
        build("mixed", keys="klt klt klt").calibration(shape)


def test_methods_of_many_layers_are_built_a_few_times_each(monkeypatch):
    layers, built = 300, []
    component = mixed._component
    monkeypatch.setattr(mixed, "_component", lambda *given: built.append(given) or component(*given))
    shape = ModelShape(layers=layers, query_heads=4, kv_heads=2, head_dim=8, hidden_size=32, dtype="float32")
    method = build("mixed", bits=16, keys=" ".join(["fp16", "kivi-4bit:group=8"] * (layers // 2)), values="fp16")
    method.calibration(shape)
    plans = [method.plan(layer, shape, {}) for layer in range(layers)]
    assert [plan.keys.codec.nominal_bits for plan in plans] == [16, 4] * (layers // 2)
    assert len(built) < 10 * layers
