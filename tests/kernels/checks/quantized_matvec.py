"""Random operands of the matrix-vector products, and a check that the kernels are as good as PyTorch."""

from __future__ import annotations

import torch
from kernel_cases import assert_error_at_most_twice, uniform
from kvq_kernels.quantized_matvec import quantized_matvec
from kvq_kernels.quantized_matvec.launch import partial_sums
from kvq_kernels.quantized_matvec.reference import quantized_matvec_reference


def case(side, axis, tokens, dim=64, heads=1, group=2, dtype=torch.float16, rows=1, packed_group=32, **packing):
    """(vectors, packed keys or values)."""
    g = torch.Generator().manual_seed(0)
    stored = torch.float16 if dtype == torch.float32 else dtype
    packed = uniform(g, (rows, heads, tokens, dim), stored, axis=axis, group=packed_group, **packing)
    vectors = torch.randn(rows, heads * group, dim if side == "keys" else tokens, generator=g)
    return (vectors if side == "keys" else (3 * vectors).softmax(dim=-1)).to(dtype), packed


def check(side, axis, tokens, tile=None, **options) -> None:
    """Assert at most twice PyTorch's error, which dequantizes to the model's type and multiplies in it.

    Buffers are filled with NaN before.
    """
    vectors, packed = case(side, axis, tokens, **options)
    exact = quantized_matvec_reference(vectors, packed, side, torch.float64)
    # The interpreter truncates to bfloat16 where a GPU rounds: outputs are rounded here.
    wide = torch.float32 if vectors.dtype == torch.bfloat16 else vectors.dtype
    out = torch.full(exact.shape, torch.nan, dtype=wide)
    sums = None if side == "keys" else partial_sums(vectors, packed, tile).fill_(torch.nan)
    result = quantized_matvec(vectors, packed, side, out=out, partial=sums, backend="triton", tile=tile)
    in_torch = quantized_matvec_reference(vectors, packed, side, vectors.dtype)
    assert result is out
    floor = 0.0
    if vectors.dtype == torch.float32:
        # The last bits depend on the order of sums: n numbers of random signs one after the other, as on a GPU without
        # exact matrix units, lose sqrt(n / 6) roundings; PyTorch adds pairwise.
        floor = torch.finfo(torch.float32).eps * max(1, (vectors.shape[2] / 24) ** 0.5)
    assert_error_at_most_twice(result.to(vectors.dtype), in_torch, exact, floor)
