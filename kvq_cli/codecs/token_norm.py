"""Tokens divided by their norm over all kv heads, around any codec (OScaR's keys)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Packed, Part, refuse_unless
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.ordered_sum import ordered_sum
from kvq_cli.codecs.wrapped import WrappedCodec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class TokenNormCodec(WrappedCodec):
    """`base` encodes x / n with n the Euclidean norm of a token's numbers of all kv heads; decoding multiplies by n.

    Tokens of zeros have n = 1. Parts: those of `base`; `norm` float32 `[B, 1, T, 1]`, unit 1.
    """

    joins_heads = True
    unread_by_kernels = "tokens are divided by their norm before they are packed"

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        base = super().layout(heads, dim, dtype)
        return replace(base, parts={**base.parts, "norm": PartSpec(1, 1, (1,), "float32")})

    def check(self, packed: Packed) -> None:
        super().check(packed)
        refuse_unless(packed.parts["norm"].tensor >= 0, "norm")

    def _encode(self, x: Tensor) -> Packed:
        x = x.float()
        norm = ordered_sum(ordered_sum(x * x), dim=1).sqrt_()
        norm = norm.masked_fill_(norm == 0, 1)
        packed = self.base.encode(x / norm)
        return Packed(packed.tokens, {**packed.parts, "norm": Part(norm, 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.base.decode(packed, torch.float32).mul_(packed.parts["norm"].tensor).to(dtype)
