"""Plans of KIVI and fp16: sources, windows, cost."""

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def bits_per_number(stream, shape, tokens=256):
    x = torch.randn(1, shape.kv_heads, tokens, shape.head_dim).to(shape.torch_dtype)
    return stream.codec.encode(x).nbytes * 8 / x.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_two_bits_in_groups_of_32_cost_three(shape_of, dtype):
    shape = shape_of(dtype=dtype)
    plan = build("kivi", bits=2).plan(0, shape, {})
    assert bits_per_number(plan.keys, shape) == 3.0
    assert bits_per_number(plan.values, shape) == 3.0
    assert build("kivi", bits=2).nominal_bits == 2


def test_residual_windows(shape):
    plan = build("kivi").plan(0, shape, {})
    assert (plan.keys.source, plan.keys.window) == ("post_rope", Window(0, 0, 128))
    assert (plan.values.source, plan.values.window) == ("value", Window(0, 128, 1))


def test_sink_and_recent_windows(shape):
    plan = build("kivi", sinks=32, recent=96).plan(0, shape, {})
    assert plan.keys.window == Window(32, 96, 32)
    assert plan.values.window == Window(32, 96, 1)


def test_pre_rope(shape):
    assert build("kivi", pre_rope=True).plan(0, shape, {}).keys.source == "pre_rope"


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_keys_are_packed_in_whole_groups(shape, bits, group):
    plan = build("kivi", bits=bits, group=group).plan(0, shape, {})
    for stream in (plan.keys, plan.values):
        assert stream.window.flush % stream.codec.block_tokens == 0
        assert bits_per_number(stream, shape) == bits + 32 / group


def test_keys_share_a_scale_over_tokens_and_values_over_channels(shape):
    """A large channel does not harm the other channels' keys; a large token does not harm the other tokens' values."""
    plan = build("kivi", bits=4).plan(0, shape, {})
    x = torch.rand(1, 2, 128, 64)
    keys, values = x.clone(), x.clone()
    keys[..., 5] *= 1000
    values[:, :, 7] *= 1000
    for stream, spoiled, others in (
        (plan.keys, keys, (slice(None), slice(None), slice(None), slice(6, None))),
        (plan.values, values, (slice(None), slice(None), slice(8, None))),
    ):
        decoded = stream.codec.decode(stream.codec.encode(spoiled), torch.float32)
        assert (decoded - spoiled)[others].abs().max() < 0.04


def test_group_that_does_not_divide_head_dim_is_refused(shape_of):
    with pytest.raises(UsageError, match="group=32 does not divide head_dim=80.*16, 20, 40, 80"):
        build("kivi").plan(0, shape_of(head_dim=80), {})
    shape = shape_of(head_dim=80)
    plan = build("kivi", group=16).plan(0, shape, {})
    assert bits_per_number(plan.values, shape) == 4  # 2 + 32 / 16: 80 numbers of 2 bits fill 5 words


def test_fp16_is_lossless(shape_of):
    shape = shape_of(dtype=torch.bfloat16)
    plan = build("fp16").plan(0, shape, {})
    x = torch.randn(1, 2, 5, 64).bfloat16()
    for stream, source in ((plan.keys, "post_rope"), (plan.values, "value")):
        assert (stream.source, stream.window) == (source, Window(0, 0, 1))
        assert torch.equal(stream.codec.decode(stream.codec.encode(x), x.dtype), x)
        assert bits_per_number(stream, shape) == 16


@pytest.mark.parametrize("key_axis", ["channel", "token"])
def test_rotation_changes_neither_bytes_nor_windows(shape, key_axis):
    plain, rotated = (
        build("kivi", rotation=rotation, key_axis=key_axis).plan(0, shape, {}) for rotation in ("none", "hadamard")
    )
    for before, after in zip(plain.kept, rotated.kept, strict=True):
        assert (after.source, after.window) == (before.source, before.window)
        assert bits_per_number(after, shape) == bits_per_number(before, shape)
        assert after.codec.base.axis == before.codec.axis
    assert plain.keys.window == (Window(0, 0, 128) if key_axis == "channel" else Window(0, 128, 1))


def test_rotation_refuses_other_head_dims(shape_of):
    with pytest.raises(UsageError, match="Hadamard rotation of 112 channels"):
        build("kivi", rotation="hadamard", group=16).plan(0, shape_of(head_dim=112), {})
