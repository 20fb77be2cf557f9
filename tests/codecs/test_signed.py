"""Symmetric and hybrid groups against InnerQ's equations in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import parametrize_pairwise

from kvq_cli.codecs.base import Prompt
from kvq_cli.codecs.normalized import NormalizedCodec
from kvq_cli.codecs.phased import PhasedCodec
from kvq_cli.codecs.signed import SignedCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

HEAD_DIM = 64
AXES = ("channel", "token")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def numbers(seed: int, dtype=torch.float16, tokens=64, spread=1.0, offset=0.0) -> torch.Tensor:
    x = torch.randn(2, 2, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return (x * spread + offset).to(dtype)


@pytest.mark.parametrize("sign", ["extra", "inside"])
@pytest.mark.parametrize("axis", AXES)
def test_scales_out_of_range_are_the_largest(axis, sign):
    x = numbers(0, torch.float32)
    x[0, 0, 0, 0] = -3e6
    codec = SignedCodec(2, axis, 32, HEAD_DIM, torch.float32, sign)
    decoded = codec.decode(codec.encode(x), torch.float32)
    assert decoded.isfinite().all() and decoded[0, 0, 0, 0] <= -60_000


def groups_of(x: torch.Tensor, axis: str, group: int) -> np.ndarray:
    """float64, the numbers of a group along the last axis."""
    x = x.double().numpy()
    x = np.moveaxis(x, 3, 2) if axis == "channel" else x
    return x.reshape(*x.shape[:3], -1, group)


def scales(packed, axis: str) -> np.ndarray:
    """Stored scales as float64, one for each group of `groups_of`."""
    scale = packed.parts["scale"].tensor.double().numpy()
    return (np.moveaxis(scale, 3, 2) if axis == "channel" else scale)[..., None]


def rounded(x: torch.Tensor, codec: UniformCodec, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, decoded numbers) in groups."""
    return groups_of(x, codec.axis, group), groups_of(codec.decode(codec.encode(x), torch.float32), codec.axis, group)


@parametrize_pairwise(
    {
        "dtype": DTYPES,
        "axis": AXES,
        "bits, sign": [*((b, "extra") for b in (1, 2, 3, 4, 8)), (2, "inside"), (4, "inside")],
    }
)
def test_symmetric_groups_equal_equation_13(bits, sign, axis, dtype):
    x = numbers(bits, dtype, spread=3.0, offset=1.0)
    codec = SignedCodec(bits, axis, 32, HEAD_DIM, dtype, sign)
    groups, decoded = rounded(x, codec, 32)
    largest = 2**bits - 1 if sign == "extra" else 2 ** (bits - 1) - 1
    scale = scales(codec.encode(x), axis)
    half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    np.testing.assert_allclose(scale, np.abs(groups).max(-1, keepdims=True) / largest, rtol=half_ulp * 1.001)
    ideal = groups / scale
    tie = np.abs(np.abs(ideal) % 1 - 0.5) < 1e-4
    expected = np.clip(np.rint(ideal), -largest, largest) * scale
    np.testing.assert_allclose(decoded[~tie], expected[~tie], rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(AXES),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(DTYPES),
    st.floats(0.01, 30),
    st.floats(-30, 30),
    st.integers(0, 99),
)
def test_hybrid_takes_the_better_mode_per_group(bits, axis, group, dtype, spread, offset, seed):
    x = numbers(seed, dtype, spread=spread, offset=offset)
    x[0, 0, :32] = abs(x[0, 0, :32])  # groups of one sign, where asymmetric is the better
    asymmetric = UniformCodec(bits, axis, group, HEAD_DIM, dtype, SignedCodec(bits, axis, group, 64, dtype).zero_dtype)
    errors = []
    for codec in (
        SignedCodec(bits, axis, group, HEAD_DIM, dtype, hybrid="always"),
        SignedCodec(bits, axis, group, HEAD_DIM, dtype),
        asymmetric,
    ):
        groups, decoded = rounded(x, codec, group)
        errors.append(((groups - decoded) ** 2).sum(-1))
    hybrid, *both = errors
    np.testing.assert_allclose(hybrid, np.minimum(*both), rtol=1e-3, atol=1e-7 * (spread + abs(offset)) ** 2)


@pytest.mark.parametrize("axis", AXES)
def test_symmetric_groups_in_hybrid_storage(axis):
    """Both codecs decode them, so that one can encode the prompt and the other later tokens."""
    x = numbers(3, offset=0.7)
    always, later = (SignedCodec(2, axis, 32, HEAD_DIM, hybrid=hybrid) for hybrid in ("always", "symmetric"))
    symmetric = SignedCodec(2, axis, 32, HEAD_DIM)
    packed = later.encode(x)
    assert packed.parts.keys() == always.encode(x).parts.keys()
    expected = symmetric.decode(symmetric.encode(x), torch.float32)
    torch.testing.assert_close(later.decode(packed, torch.float32), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(always.decode(packed, torch.float32), later.decode(packed, torch.float32))


@pytest.mark.parametrize("norm", [False, True])
def test_hybrid_prompt_with_symmetric_later_tokens(norm):
    x, always = numbers(3, offset=0.7), SignedCodec(2, "token", 32, HEAD_DIM, hybrid="always")
    later = SignedCodec(2, "token", 32, HEAD_DIM, hybrid="symmetric")
    codec = NormalizedCodec(always, later) if norm else PhasedCodec(always, later)
    packed, state = codec.encode_prompt(x, Prompt(x, x, x), 0)
    divided = x / state["norm"].unsqueeze(2) if norm else x
    for expected, actual in (
        (always.encode(divided), packed),
        (later.encode(divided), codec.with_state(state).encode(x)),
    ):
        for name, part in expected.parts.items():
            assert torch.equal(actual.parts[name].tensor, part.tensor), name


@parametrize_pairwise({"hybrid": ["no", "always"], "group": [16, 32, 64], "axis": AXES})
def test_zeros_constants_and_tiny_numbers_decode_without_nan(axis, group, hybrid):
    x = torch.zeros(1, 2, 64, HEAD_DIM)
    x[0, 1] = -3.0
    x[0, 0, :, 32:] = 1e-30  # its scale is 0 in 16 bits
    codec = SignedCodec(2, axis, group, HEAD_DIM, hybrid=hybrid)
    decoded = codec.decode(codec.encode(x), torch.float32)
    torch.testing.assert_close(decoded, x, rtol=0, atol=1e-29)


@pytest.mark.parametrize(
    ("bits", "group", "sign", "hybrid", "expected"),
    [
        (2, 32, "extra", "no", 2 + 1 + 0.5),
        (2, 32, "extra", "always", 2 + 1 + 0.5),
        (2, 16, "extra", "always", 2 + 1 + 1),
        (3, 64, "extra", "symmetric", 3 + 1 + 0.25),
        (2, 32, "inside", "no", 2 + 0.5),
        (8, 32, "extra", "always", 8 + 1 + 0.5),
    ],
)
@pytest.mark.parametrize("axis", AXES)
def test_bits_per_number(axis, bits, group, sign, hybrid, expected):
    x = numbers(0)
    packed = SignedCodec(bits, axis, group, HEAD_DIM, sign=sign, hybrid=hybrid).encode(x)
    assert packed.nbytes * 8 / x.numel() == expected


def test_undefined_combinations_are_refused():
    with pytest.raises(UsageError, match="bits=1 leaves no bit for the magnitude"):
        SignedCodec(1, "token", 32, 64, sign="inside")
    with pytest.raises(UsageError, match="a hybrid keeps zero-points in the words of sign bits"):
        SignedCodec(2, "token", 32, 64, sign="inside", hybrid="always")
    with pytest.raises(UsageError, match="group=8: .* one of 16, 32, 64"):
        SignedCodec(2, "token", 8, 64)
    with pytest.raises(UsageError, match="group=32 does not divide head_dim=80"):
        SignedCodec(2, "token", 32, 80)
