"""Random numbers, and a check that they are packed to the codecs' bits."""

from __future__ import annotations

import torch
from kvq_kernels.quantize_pack import Layout, quantize_pack

from kvq_cli.codecs.signed import SignedCodec, zero_type
from kvq_cli.codecs.uniform import UniformCodec

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(tokens: int, dim: int = 64, dtype=torch.float16, rows: int = 2, heads: int = 1) -> torch.Tensor:
    """Random numbers with channels of different spread, shifted, constant and zero groups, zeros of both signs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, heads, tokens, dim, generator=g) * torch.rand(dim, generator=g) * 3
    x += torch.randn(rows, heads, tokens, 1, generator=g) * (torch.rand(heads, tokens, 1, generator=g) < 0.3)
    x[:, :, :, :16] = 0.7
    x[0, :, :, 16:32] = 0.0
    x[0, :, ::2, 16:32] = -0.0
    return x.to(dtype)


def codec(bits, axis, group, dim, dtype, mode, sign):
    """Codec that packs as `layout` describes."""
    if mode == "asymmetric":
        return UniformCodec(bits, axis, group, dim, dtype)
    return SignedCodec(bits, axis, group, dim, dtype, sign, "always" if mode == "hybrid" else "no")


def layout(bits, axis, group, dim, dtype, mode, sign) -> Layout:
    """Layout of a codec's tensors."""
    scale_dtype = torch.float16 if dtype == torch.float32 else dtype
    zero_dtype = getattr(torch, zero_type(group, dtype)) if sign == "extra" else scale_dtype
    return Layout(bits, axis, group, dim, mode, sign or "inside", scale_dtype, zero_dtype)


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, a in actual.items():
        b = expected[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        integers = INTEGERS[a.element_size()]
        assert torch.equal(a.contiguous().view(integers), b.contiguous().view(integers)), name


def check(bits, axis, group, dim, dtype, mode, sign, tokens, tile=None, make=numbers) -> None:
    """Assert that kernel and reference pack to the bits of the codec."""
    x = make(tokens, dim, dtype)
    reference_codec = codec(bits, axis, group, dim, dtype, mode, sign)
    expected = {name: part.tensor for name, part in reference_codec.encode(x).parts.items()}
    its_layout = layout(bits, axis, group, dim, dtype, mode, sign)
    for backend in ("triton", "torch"):
        packed = quantize_pack(x, its_layout, backend=backend, tile=tile)
        actual = {"codes": packed.codes, "scale": packed.scale, "zero": packed.zero}
        actual["sign_or_zero" if mode == "hybrid" else "sign"] = packed.sign
        assert_same_bits({name: tensor for name, tensor in actual.items() if tensor is not None}, expected)
        assert (packed.level, packed.hybrid) == (its_layout.level, mode == "hybrid")
