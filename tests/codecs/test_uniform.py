"""The uniform quantizer against its definition and error bounds in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import parametrize_pairwise

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

HEAD_DIM, GROUP = 64, 32
AXES = ("channel", "token")
BITS = (1, 2, 3, 4, 8)


def numbers(seed: int, dtype=torch.float16, tokens=64, spread=1.0, offset=0.0) -> torch.Tensor:
    x = torch.randn(2, 3, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return (x * spread + offset).to(dtype)


def groups_of(x: torch.Tensor, axis: str) -> np.ndarray:
    """float64, the numbers of a group along the last axis."""
    x = x.double().numpy()
    if axis == "channel":
        x = np.moveaxis(x, 3, 2)
    return x.reshape(*x.shape[:3], -1, GROUP)


def side(packed, name: str, axis: str) -> np.ndarray:
    """Stored scales or zero-points as float64, one per group of `groups_of`."""
    tensor = packed.parts[name].tensor.double().numpy()
    return np.moveaxis(tensor, 3, 2) if axis == "channel" else tensor


@parametrize_pairwise({"dtype": [torch.float16, torch.bfloat16, torch.float32], "axis": AXES, "bits": BITS})
def test_codec_equals_the_definition_in_float64(bits, axis, dtype):
    x = numbers(bits, dtype, spread=3.0, offset=1.0)
    codec = UniformCodec(bits, axis, GROUP, HEAD_DIM, dtype)
    packed = codec.encode(x)
    groups = groups_of(x, axis)
    zero, scale = side(packed, "zero", axis), side(packed, "scale", axis)
    half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    low, high = groups.min(-1), groups.max(-1)
    np.testing.assert_allclose(zero, low, rtol=half_ulp * (dtype == torch.float32))
    np.testing.assert_allclose(scale, (high - low) / (2**bits - 1), rtol=half_ulp * 1.001)

    ideal = (groups - zero[..., None]) / scale[..., None]
    codes = groups_of(bitpack.unpack(packed.parts["codes"].tensor, codec.bits, codec.head_dim).float(), axis)
    tie = np.abs(ideal - np.floor(ideal) - 0.5) < 1e-4
    np.testing.assert_array_equal(codes[~tie], np.clip(np.rint(ideal), 0, 2**bits - 1)[~tie])
    decoded = groups_of(codec.decode(packed, torch.float32), axis)
    np.testing.assert_allclose(decoded, codes * scale[..., None] + zero[..., None], rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(BITS),
    st.sampled_from(AXES),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.floats(1e-3, 100),
    st.floats(-100, 100),
    st.integers(0, 99),
)
def test_error_is_at_most_half_a_step_plus_rounding(bits, axis, dtype, spread, offset, seed):
    x = numbers(seed, dtype, tokens=32, spread=spread, offset=offset)
    codec = UniformCodec(bits, axis, GROUP, HEAD_DIM, dtype)
    packed = codec.encode(x)
    error = np.abs(groups_of(codec.decode(packed, torch.float32), axis) - groups_of(x, axis))
    # A scale that was rounded down leaves the top of the range uncovered by 2^b - 1 times its rounding error.
    scale = side(packed, "scale", axis)[..., None]
    half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    subnormal = 2.0**-24
    assert (error <= scale / 2 + (2**bits - 1) * (scale * half_ulp + subnormal) + 1e-5).all()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_constant_groups_are_exact(bits, axis):
    x = numbers(0)
    x[:, :, :32] = torch.tensor([0.0, -7.3, 1e-7, 65504.0]).to(x.dtype).repeat(16)[None, None, None]
    x[0, 0, :, :32] = 0.1
    x[1, :, :, :] = -3.0
    decoded = UniformCodec(bits, axis, GROUP, HEAD_DIM).encode(x)
    decoded = UniformCodec(bits, axis, GROUP, HEAD_DIM).decode(decoded, x.dtype)
    assert torch.equal(decoded[0, 0, :, :32], x[0, 0, :, :32])
    assert torch.equal(decoded[1], x[1])
    if axis == "channel":
        assert torch.equal(decoded[:, :, :32], x[:, :, :32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_scales_and_zero_points_out_of_range_are_the_largest(bits, axis, dtype):
    """Groups whose range or minimum no 16-bit number holds decode to finite numbers, and other groups as before."""
    x = numbers(0, dtype)
    expected = UniformCodec(bits, axis, GROUP, HEAD_DIM, dtype)
    expected = expected.decode(expected.encode(x), torch.float32)
    largest = 40_000 if dtype == torch.float16 else 3e6
    x[0, 0, 0, 0], x[0, 0, 1, 0], x[0, 0, 0, 1] = largest, -largest, -largest
    codec = UniformCodec(bits, axis, GROUP, HEAD_DIM, dtype)
    packed = codec.encode(x)
    assert packed.parts["scale"].tensor.isfinite().all() and packed.parts["zero"].tensor.isfinite().all()
    decoded = codec.decode(packed, torch.float32)
    assert decoded.isfinite().all() and decoded[0, 0, :2].abs().max() >= 20_000
    assert torch.equal(decoded[1], expected[1]) and torch.equal(decoded[0, 1:], expected[0, 1:])


@pytest.mark.parametrize("axis", AXES)
def test_error_falls_as_bits_rise(axis):
    x = numbers(5)
    errors = []
    for bits in BITS:
        codec = UniformCodec(bits, axis, GROUP, HEAD_DIM)
        errors.append((codec.decode(codec.encode(x), torch.float32) - x.float()).square().mean().item())
    assert all(worse > 2 * better for worse, better in zip(errors, errors[1:], strict=False)), errors


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("bits", "group", "expected"), [(2, 32, 3.0), (4, 32, 5.0), (3, 64, 3.5), (1, 32, 2.0), (8, 16, 10.0)]
)
def test_bits_per_number(bits, group, axis, expected):
    x = numbers(0)
    packed = UniformCodec(bits, axis, group, HEAD_DIM, torch.bfloat16).encode(x)
    assert packed.nbytes * 8 / x.numel() == expected


def test_group_that_does_not_divide_head_dim_names_valid_groups():
    with pytest.raises(UsageError, match=r"group=32 does not divide head_dim=80; .* 4, 5, 8, 10, 16, 20, 40, 80"):
        UniformCodec(2, "token", 32, 80)
    x = torch.randn(1, 1, 32, 80)
    for axis in AXES:
        codec = UniformCodec(8, axis, 16, 80)
        assert (codec.decode(codec.encode(x), torch.float32) - x).abs().max() < 0.02


def test_unpackable_bits_are_refused():
    with pytest.raises(UsageError, match="bits=5.*1, 2, 3, 4 or 8"):
        UniformCodec(5, "token", 32, 64)
