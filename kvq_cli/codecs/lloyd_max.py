"""TurboQuant's quantizer (https://arxiv.org/abs/2504.19874): one norm per token, Lloyd-Max codes of its coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Codec, KeyRotation, Packed, Part, refuse_unless
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.ordered_sum import ordered_sum
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from kvq_kernels.decode_attention import Directions
    from torch import Tensor

#: Bits of a code.
BITS = (1, 2, 3, 4)
#: Rounds of Lloyd's iteration, which converges to float64 rounding in less.
_ROUNDS = 4000


class LloydMaxCodec(Codec):
    """x' = n c[q] with n = ||x|| of the head_dim numbers of a token, and q_i the nearest centroid of x_i / n.

    Centroids are the Lloyd-Max quantizer of N(0, 1 / head_dim), the limit distribution of a coordinate of a random unit
    vector; `x` is to be rotated, so that its coordinates are of that distribution (`RotatedCodec`).

    correct_norm: c[q] is divided by its own norm, so that ||x'|| = n.

    The centroids are no `constants`: all layers of all models of a process read one table of 2^bits numbers.

    Parts: `codes` int32 `[B, H, T, words]`, planar (see `bits`); `norm` float16 `[B, H, T, 1]`, at most 65,504. Both
    have unit 1.
    """

    block_tokens = 1
    unread_by_kernels: str | None = None

    def __init__(self, bits: int, head_dim: int, correct_norm: bool = True) -> None:
        if bits not in BITS:
            raise UsageError(f"bits={bits}: Lloyd-Max codes have 1, 2, 3 or 4 bits")
        self.bits, self.head_dim, self.correct_norm = bits, head_dim, correct_norm
        self.nominal_bits = float(bits)

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        codes = PartSpec(heads, 1, (bitpack.words_per_row(self.bits, dim),), "int32")
        return Layout({"codes": codes, "norm": PartSpec(heads, 1, (1,), "float16")})

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> Directions:
        from kvq_kernels.decode_attention import Directions

        codes, norm = parts["codes"].tensor, parts["norm"].tensor
        return Directions(codes, norm, _tables(self.bits, self.head_dim, codes.device)[0], self.bits, self.correct_norm)

    def check(self, packed: Packed) -> None:
        refuse_unless(packed.parts["norm"].tensor >= 0, "norm")

    def _encode(self, x: Tensor) -> Packed:
        x = x.float()
        norm = ordered_sum(x * x).sqrt_()
        unit = x / norm.masked_fill(norm == 0, 1)
        codes = torch.bucketize(unit, _tables(self.bits, self.head_dim, x.device)[1], out_int32=True, right=True)
        norm = norm.clamp_(max=torch.finfo(torch.float16).max).half()
        return Packed(x.shape[2], {"codes": Part(bitpack.pack(codes, self.bits), 1), "norm": Part(norm, 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim)
        x = _tables(self.bits, self.head_dim, codes.device)[0][codes.int()]
        norm = packed.parts["norm"].tensor.float()
        if self.correct_norm:
            norm = norm / ordered_sum(x * x).sqrt_()
        return x.mul_(norm).to(dtype)


@cache
def _tables(bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centroids `[2^bits]` of N(0, 1 / width), and the midpoints between them, float32 on the device."""
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64) / math.sqrt(width)
    return levels.float().to(device), ((levels[1:] + levels[:-1]) / 2).float().to(device)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits levels of the Lloyd-Max quantizer of a standard normal number, ascending: each is the mean of the
    numbers that are nearest to it (Max, 1960)."""
    count = 2**bits
    levels = [(2 * i + 1 - count) * 3 / count for i in range(count)]
    for _ in range(_ROUNDS):
        edges = [-math.inf, *((a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)), math.inf]
        levels = [_mean_between(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    return tuple(levels)


def _mean_between(low: float, high: float) -> float:
    """The mean of a standard normal number that lies in [low, high]."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return (density(low) - density(high)) / (below(high) - below(low))
