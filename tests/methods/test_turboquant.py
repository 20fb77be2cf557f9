"""Plans of TurboQuant: sources, windows, cost, refusals."""

import pytest
import torch

from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.rotated import RotatedCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def bytes_of_a_token(plan, shape, dim=128):
    x = torch.randn(1, 1, 8, dim)
    return [stream.codec.encode(x).nbytes / 8 for stream in plan.kept]


@pytest.mark.parametrize(
    ("options", "slot"),
    [  # vLLM's bytes of a token and head of 128, of its presets: codes and norm, codes, scale and zero-point
        ({"bits": 4}, (64 + 2, 64 + 4)),
        ({"bits": 3, "value_bits": 4}, (48 + 2, 64 + 4)),
        ({"bits": 3}, (48 + 2, 48 + 4)),
    ],
)
def test_bytes_are_those_of_the_presets_of_vllm(options, slot, shape_of):
    shape = shape_of(head_dim=128)
    plan = build("turboquant", **options).plan(0, shape, {})
    assert tuple(bytes_of_a_token(plan, shape)) == slot
    assert (plan.keys.source, plan.values.source) == ("post_rope", "value")
    assert plan.keys.window == plan.values.window == Window(0, 0, 1)


def test_values_are_uniform_or_rotated(shape):
    uniform, rotated = (
        build("turboquant", bits=3, values=values).plan(0, shape, {}).values.codec
        for values in ("uniform", "lloyd_max")
    )
    assert isinstance(uniform, UniformCodec) and (uniform.axis, uniform.group) == ("token", shape.head_dim)
    assert isinstance(rotated, RotatedCodec)
    assert build("turboquant", bits=3, value_bits=4).nominal_bits == 3.5


def test_first_and_last_layers_stay_uncompressed_if_asked(shape_of):
    shape = shape_of(layers=5)
    plans = [build("turboquant", skip_layers=2).plan(layer, shape, {}) for layer in range(5)]
    assert [isinstance(plan.keys.codec, IdentityCodec) for plan in plans] == [True, True, False, True, True]
    with pytest.raises(UsageError, match="skip_layers=3 leaves none of 5 layers"):
        build("turboquant", skip_layers=3).plan(0, shape, {})


@pytest.mark.parametrize(("options", "message"), [({"bits": 8}, "1 to 4 bits"), ({"values": "raw"}, "not one of")])
def test_refusals(options, message):
    with pytest.raises(UsageError, match=message):
        build("turboquant", **options)


def test_head_dims_without_a_hadamard_matrix_are_refused(shape_of):
    with pytest.raises(UsageError, match="Hadamard rotation of 72 channels"):
        build("turboquant").plan(0, shape_of(head_dim=72), {})
