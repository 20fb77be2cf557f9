"""Plans of OSCAR: sources, windows, cost, refusals."""

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def plan_of(method, shape, tensors_for):
    return method.plan(0, shape, tensors_for(method.calibration(shape), shape, []))


@pytest.mark.parametrize(("dim", "bits"), [(128, 2 + 32 / 128), (256, 2 + 32 / 128), (64, 2 + 32 / 64)])
def test_groups_of_128_channels_take_a_quarter_bit(dim, bits, shape_of, tensors_for):
    shape = shape_of(head_dim=dim)
    plan = plan_of(build("oscar"), shape, tensors_for)
    x = torch.randn(1, shape.kv_heads, 8, dim)
    assert [8 * stream.codec.encode(x).nbytes / x.numel() for stream in plan.kept] == [bits, bits]
    assert (plan.keys.source, plan.values.source) == ("post_rope", "value")
    assert plan.keys.window == plan.values.window == Window(64, 256, 1)


def test_all_heads_share_the_rotation_of_a_layer(shape, tensors_for):
    codec = plan_of(build("oscar"), shape, tensors_for).keys.codec
    dim = shape.head_dim
    assert codec.constants()["rotated.rotation"].shape == (1, dim, dim)
    x = torch.randn(1, 1, 5, dim).expand(1, shape.kv_heads, 5, dim)
    decoded = codec.decode(codec.encode(x), torch.float32)
    assert torch.equal(decoded[:, 0], decoded[:, 1])


def test_refusals(shape_of):
    with pytest.raises(UsageError, match="oscar needs an artifact"):
        build("oscar").plan(0, shape_of(), {})
    with pytest.raises(UsageError, match="Hadamard rotation of 72 channels"):
        build("oscar").calibration(shape_of(head_dim=72))
    with pytest.raises(UsageError, match="key_clip=1.5 must be at most 1"):
        build("oscar", key_clip=1.5)
