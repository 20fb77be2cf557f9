"""Quantized matrix-vector products by the kernels against float64."""

from __future__ import annotations

import pytest
import torch
from checks.quantized_matvec import case, check
from kernel_cases import uniform
from kvq_kernels.decode_attention import Uniform
from kvq_kernels.quantized_matvec import quantized_matvec
from kvq_kernels.quantized_matvec.reference import quantized_matvec_reference
from pairwise import parametrize_pairwise
from tiers import slow

from kvq_cli.codecs.signed import SignedCodec

pytestmark = pytest.mark.gpu

SIDES = ["keys", "values"]
AXES = ["token", "channel"]


@parametrize_pairwise({"side": SIDES, "axis": AXES, "tokens": [1, 7, 31, 33, 300]})
def test_lengths(side, axis, tokens):
    check(side, axis, tokens)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("axis", AXES)
def test_a_thousand_tokens(side, axis):
    tile = {"tokens": 256, "columns": 16, "warps": 4, "stages": 2, "waves": 1, "queries": 8}
    check(side, axis, 1000, tile, dim=32, group=1, packed_group=32 if axis == "token" else 256)


@parametrize_pairwise({"side": SIDES, "axis": AXES, "bits": [1, 3, 4, 8]})
def test_bits(side, axis, bits):
    check(side, axis, 40, bits=bits, dim=128 if bits == 3 else 64)


@parametrize_pairwise(
    {
        "side": SIDES,
        "axis": AXES,
        "mode, bits, dim": [
            *((mode, 2, 128) for mode in ("inside", "extra", "hybrid-extra")),
            ("extra", 1, 64),
            ("hybrid-extra", 4, 96),
        ],
    }
)
def test_modes(side, axis, mode, bits, dim):
    check(side, axis, 40, mode=mode, bits=bits, dim=dim)


@parametrize_pairwise({"side": SIDES, "axis": AXES, "dim": [16, 80, 96, 128], "dtype": [torch.bfloat16, torch.float32]})
def test_head_dims(side, axis, dim, dtype):
    check(side, axis, 50, dim=dim, dtype=dtype, packed_group=16)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("group", [1, *slow(4, 8)])
def test_query_heads(side, group):
    check(side, "token", 40, heads=2, group=group, rows=2)
    check(side, "channel", 40, heads=2, group=group, rows=2)


@parametrize_pairwise({"side": SIDES, "group": [16, 64], "axis": AXES})
def test_signs_of_other_groups(side, group, axis):
    """Words of 16 and 64 sign bits, as the codec writes them."""
    g = torch.Generator().manual_seed(0)
    codec = SignedCodec(2, axis, group, 64)
    x = torch.randn(1, 1, 64, 64, generator=g).half()
    parts = {name: part.tensor for name, part in codec.encode(x).parts.items()}
    packed = Uniform(parts["codes"], parts["scale"], 2, axis, group, sign=parts["sign"])
    vectors = torch.rand(1, 2, 64, generator=g).half()
    decoded = codec.decode(codec.encode(x), torch.float32)[0, 0]
    expected = vectors[0].float() @ (decoded.T if side == "keys" else decoded)
    out = quantized_matvec(vectors, packed, side, backend="triton")
    torch.testing.assert_close(out[0].float(), expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("programs", [1, 3])
def test_partial_sums_are_added(programs):
    vectors, packed = case("values", "channel", 96)
    exact = quantized_matvec_reference(vectors, packed, "values", torch.float64)
    sums = torch.full((programs, 1, 2, 64), torch.nan)
    out = quantized_matvec(vectors, packed, "values", partial=sums, backend="triton")
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=2e-3)


def test_small_weights_are_scaled():
    """Weights of 2^-17 times small scales are too small for float16."""
    g = torch.Generator().manual_seed(0)
    packed = uniform(g, (1, 1, 64, 64), torch.float16, axis="token", bits=8)
    weights = torch.full((1, 1, 64), 2.0**-17)
    exact = quantized_matvec_reference(weights, packed, "values", torch.float64)
    out = quantized_matvec(weights.bfloat16(), packed, "values", backend="triton")
    assert (out.double() - exact).norm() <= 8e-3 * exact.norm()


def test_shapes_that_do_not_fit_are_refused():
    vectors, packed = case("keys", "token", 40)
    with pytest.raises(ValueError, match="numbers for values of 40 tokens"):
        quantized_matvec(vectors, packed, "values")
    with pytest.raises(ValueError, match="query heads"):
        quantized_matvec(vectors.expand(2, -1, -1), packed, "keys")
    with pytest.raises(ValueError, match="keys or values"):
        quantized_matvec(vectors, packed, "queries")
