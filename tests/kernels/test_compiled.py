"""What is shipped, as it is compiled, against PyTorch in float64: on a GPU, or what a GPU would execute (see `ptx`).

These are the launches that `test_static.py` compiles, so that nothing is compiled twice. Without a GPU they run where
KVQ_TEST_PTX names one (`make test` does); other tests of kernels can be run so, too, which compiles for a while.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import Case, codebook, dense, sparse, uniform
from kvq_kernels.decode_attention import Codebook, Dense, Outliers, Side
from kvq_kernels.decode_attention.shipped import DIM, GROUP, HEADS, shipped


def like(packed):
    """Random numbers that are stored as a shipped side's are."""
    if isinstance(packed, Dense):
        return dense
    if isinstance(packed, Codebook):
        heads, shares, entries, _ = packed.centroids.shape
        kinds = {"normalize": packed.mean is not None, "per_token": packed.token_scale is not None}
        return partial(codebook, block=packed.block, entries=entries, share=DIM // shares, own_heads=heads, **kinds)
    mode = "asymmetric"
    if packed.zero is None or packed.hybrid:
        mode = "hybrid-" * packed.hybrid + ("extra" if packed.sign is not None else "inside")
    return partial(uniform, bits=packed.bits, axis=packed.axis, group=packed.group, mode=mode)


def beside(outliers: Outliers | None):
    together = outliers is not None and outliers.start is not None
    return outliers and partial(sparse, slots=outliers.index.shape[3], together=together)


def case(name: str, lengths: list[int]) -> Case:
    keys, values, rope = shipped()[name]
    sides: tuple[Side, Side] = (keys, values)
    return Case(
        *(like(side.packed) for side in sides),
        lengths,
        dim=DIM,
        heads=HEADS,
        group=GROUP,
        dtype=keys.ring.dtype,
        sinks=keys.sinks.shape[2],
        waiting=(13, 13),  # and room for 32, a multiple of 16 as the shipped one is
        rope=rope and (rope.style, DIM),
        outliers=tuple(beside(side.outliers) for side in sides),
        norm=keys.norm is not None,
    )


@pytest.mark.slow  # to compile
@pytest.mark.parametrize("name", shipped())
def test_decode_attention(name):
    case(name, [330]).check(splits=1)


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """out [M, N] = a b, where A and B say that a [K, M] and b [N, K] lie transposed; and twice the same."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if A else tl.load(a + m[:, None] * K + k[None, :])
    right = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if B else tl.load(b + k[:, None] * N + n[None, :])
    product = tl.dot(left, right)
    tl.store(out + m[:, None] * N + n[None, :], product + tl.dot(left, right, product))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("size", "warps"), [((64, 16, 32), 4), ((128, 32, 64), 4), ((64, 128, 16), 8), ((16, 8, 64), 1)]
)
def test_products(size, warps, transposed, dtype):
    """Of one warp or of four, from registers and from shared memory of every pattern: what is executed on a CPU is
    right about them, too."""
    g = torch.Generator().manual_seed(0)
    (m, n, k), (first, second) = size, transposed
    a, b = torch.randn(m, k, generator=g).to(dtype), torch.randn(k, n, generator=g).to(dtype)
    out = torch.full((m, n), torch.nan)
    _multiply[(1,)](
        a.T.contiguous() if first else a, b.T.contiguous() if second else b, out, *size, *transposed, num_warps=warps
    )
    torch.testing.assert_close(out.double(), 3 * (a.double() @ b.double()), atol=1e-4, rtol=1e-5)
