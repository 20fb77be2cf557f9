"""Random numbers, and whether they are packed to the same bits as by the codecs."""

from __future__ import annotations

import torch
from kvq_kernels.quantize_pack import Layout, quantize_pack

from kvq_cli.codecs.signed import SignedCodec, zero_type
from kvq_cli.codecs.uniform import UniformCodec

SIZES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(tokens: int, dim: int = 64, dtype=torch.float16, rows: int = 2, heads: int = 1) -> torch.Tensor:
    """With channels of different spread, groups away from zero, constant groups, groups of zeros of both signs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, heads, tokens, dim, generator=g) * torch.rand(dim, generator=g) * 3
    x += torch.randn(rows, heads, tokens, 1, generator=g) * (torch.rand(heads, tokens, 1, generator=g) < 0.3)
    x[:, :, :, :16] = 0.7
    x[0, :, :, 16:32] = 0.0
    x[0, :, ::2, 16:32] = -0.0
    return x.to(dtype)


def codec(bits, axis, group, dim, dtype, mode, sign):
    if mode == "asymmetric":
        return UniformCodec(bits, axis, group, dim, dtype)
    return SignedCodec(bits, axis, group, dim, dtype, sign, "always" if mode == "hybrid" else "no")


def layout(bits, axis, group, dim, dtype, mode, sign) -> Layout:
    side = torch.float16 if dtype == torch.float32 else dtype
    zero = zero_type(group, dtype) if sign == "extra" else side
    return Layout(bits, axis, group, dim, mode, sign or "inside", side, zero)


def assert_same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, a in mine.items():
        b = theirs[name]
        assert a.dtype == b.dtype and a.shape == b.shape, name
        whole = SIZES[a.element_size()]
        assert torch.equal(a.contiguous().view(whole), b.contiguous().view(whole)), name


def check(bits, axis, group, dim, dtype, mode, sign, tokens, tile=None, make=numbers) -> None:
    x = make(tokens, dim, dtype)
    own = codec(bits, axis, group, dim, dtype, mode, sign)
    expected = {name: part.tensor for name, part in own.encode(x).parts.items()}
    asked = layout(bits, axis, group, dim, dtype, mode, sign)
    for backend in ("triton", "torch"):
        packed = quantize_pack(x, asked, backend=backend, tile=tile)
        found = {"codes": packed.codes, "scale": packed.scale, "zero": packed.zero}
        found["sign_or_zero" if mode == "hybrid" else "sign"] = packed.sign
        assert_same_bits({name: side for name, side in found.items() if side is not None}, expected)
        assert (packed.level, packed.hybrid) == (asked.level, mode == "hybrid")
