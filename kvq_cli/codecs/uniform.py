"""Asymmetric uniform quantization in groups: KIVI's keys (per channel) and values (per token)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Codec, Packed, Part, side_dtype
from kvq_cli.errors import UsageError


class UniformCodec(Codec):
    """q = clip(round((x - z) / s), 0, 2^b - 1), x' = q s + z, with z = min and s = (max - min) / (2^b - 1) of a group.

    axis "channel": a group is `group` adjacent tokens of one channel (`block_tokens` = group).
    axis "token":   a group is `group` adjacent channels of one token (`block_tokens` = 1).

    Scale and zero are kept in 16 bits and the codes are computed against the kept values, so that their rounding is
    part of what the codes make up for. A constant group has s = 0 and x' = z.

    Parts: `codes` int32 `[B, H, T, words]`, planar (see `bits`), unit 1; `scale` and `zero` `[B, H, T / group, D]` with
    unit `group` (axis "channel") or `[B, H, T, D / group]` with unit 1 (axis "token").
    """

    def __init__(
        self,
        bits: int,
        axis: Literal["channel", "token"],
        group: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        if bits not in bitpack.SPLIT:
            raise UsageError(f"bits={bits}: a uniform quantizer packs 1, 2, 3, 4 or 8 bits")
        if axis == "token" and head_dim % group:
            fitting = ", ".join(str(g) for g in range(4, head_dim + 1) if head_dim % g == 0)
            raise UsageError(f"group={group} does not divide head_dim={head_dim}; groups that do: {fitting}")
        self.bits, self.axis, self.group, self.head_dim = bits, axis, group, head_dim
        self.nominal_bits = float(bits)
        self.block_tokens = group if axis == "channel" else 1
        self.dtype = side_dtype(dtype)
        self._unit = self.block_tokens
        self._group_dim = 3 if axis == "channel" else 4

    def _encode(self, x: Tensor) -> Packed:
        tokens, levels = x.shape[2], 2**self.bits - 1
        groups = self._grouped(x).float()
        low, high = groups.aminmax(dim=self._group_dim, keepdim=True)
        zero = low.to(self.dtype)
        scale = ((high - low) / levels).to(self.dtype)
        divisor = scale.float().masked_fill_(scale == 0, torch.inf)  # constant group: every code is 0, x' = z
        codes = ((groups - zero.float()) / divisor).round_().clamp_(0, levels).to(torch.uint8).view(x.shape)
        return Packed(
            tokens,
            {
                "codes": Part(bitpack.pack(codes, self.bits), 1),
                "scale": Part(scale.squeeze(self._group_dim), self._unit),
                "zero": Part(zero.squeeze(self._group_dim), self._unit),
            },
        )

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = self.levels(packed, torch.float32)
        x = self._grouped(codes)
        x.mul_(scale.float().unsqueeze(self._group_dim)).add_(zero.float().unsqueeze(self._group_dim))
        return codes.to(dtype)

    def levels(self, packed: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(codes `[B, H, T, D]` as numbers of `dtype`, scale, zero): for products that fold the scale into the query
        (axis "channel": q s . codes + q . z per group of tokens) or into the attention weights (axis "token")."""
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim).to(dtype)
        return codes, packed.parts["scale"].tensor, packed.parts["zero"].tensor

    def _grouped(self, x: Tensor) -> Tensor:
        """A view of `[B, H, T, D]` with the numbers of a group along `_group_dim`."""
        if self.axis == "channel":
            return x.unflatten(2, (-1, self.group))  # [B, H, T / group, group, D]
        return x.unflatten(3, (-1, self.group))  # [B, H, T, D / group, group]
