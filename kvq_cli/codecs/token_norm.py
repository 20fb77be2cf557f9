"""Tokens divided by their norm over all kv heads, around any codec (OScaR's keys)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed, Part, refuse_unless
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.ordered_sum import ordered_sum
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class TokenNormCodec(Codec):
    """`base` encodes x / n with n the Euclidean norm of a token's numbers of all kv heads; decoding multiplies by n.

    Tokens of zeros have n = 1. Parts: those of `base`; `norm` float32 `[B, 1, T, 1]`, unit 1.
    """

    unread_by_kernels = "tokens are divided by their norm before they are packed"

    def __init__(self, base: Codec) -> None:
        self.base = base
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        base = self.base.layout(heads, dim, dtype)
        return replace(base, parts={**base.parts, "norm": PartSpec(1, 1, (1,), "float32")})

    def check(self, packed: Packed) -> None:
        self.base.check(packed)
        refuse_unless(packed.parts["norm"].tensor >= 0, "norm")

    @property
    def capturable(self) -> bool:
        return self.base.capturable

    def _encode(self, x: Tensor) -> Packed:
        x = x.float()
        norm = ordered_sum(ordered_sum(x * x), dim=1).sqrt_()
        norm = norm.masked_fill_(norm == 0, 1)
        packed = self.base.encode(x / norm)
        return Packed(packed.tokens, {**packed.parts, "norm": Part(norm, 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.base.decode(packed, torch.float32).mul_(packed.parts["norm"].tensor).to(dtype)
