"""Dense-and-sparse quantization: any codec, with the most extreme numbers of each block stored in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed, Part, refuse_unless, side_dtype, to_side
from kvq_cli.codecs.layout import Layout, PartSpec, TensorLike, TensorSpec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens of an outlier block. Longer blocks allow uneven outliers, but keep more tokens in full precision until packed.
BLOCK_TOKENS = 32


class OutlierCodec(Codec):
    """Keeps a fixed number of outliers per block (all tokens of the block times all channels of a head) in 16 bits.

    lower, upper: `[kv_heads, head_dim]`, the thresholds. A number's rank is how far it lies outside them relative to
                  their distance; numbers inside rank below all that are outside.
    fraction:     share of the block's numbers to keep, rounded down: `capacity` of them. A block with fewer outliers
                  also keeps its next most extreme numbers, since their space is allocated anyway.

    The base codec encodes outliers moved to their threshold, and a codebook chooses codes without them, so that they do
    not affect the rest of the block.
    Parts: the base codec's, and `outlier_index` int16 (token * head_dim + channel within the block) and
    `outlier_value`, both `[B, H, T / block_tokens, capacity]` with unit block_tokens: 32 bits per outlier.
    """

    def __init__(
        self, base: Codec, lower: TensorLike, upper: TensorLike, fraction: float, dtype: torch.dtype | str
    ) -> None:
        self.stored_as = self.base = base  # kernels take outliers beside it
        self.dtype = side_dtype(dtype)
        self.block_tokens = math.lcm(BLOCK_TOKENS, base.block_tokens)
        self.nominal_bits, self.kernel_tile = base.nominal_bits, base.kernel_tile
        if not isinstance(lower, TensorSpec) and not isinstance(upper, TensorSpec):
            self._lower, self._upper = lower.float().unsqueeze(1), upper.float().unsqueeze(1)  # [H, 1, D]
        self._numbers = self.block_tokens * lower.shape[1]
        self.capacity = block_capacity(fraction, lower.shape[1], self.block_tokens)

    def constants(self) -> Mapping[str, Tensor]:
        return {**self.base.constants(), "lower": self._lower, "upper": self._upper}

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        base, unit = self.base.layout(heads, dim, dtype), self.block_tokens
        sparse = {
            "outlier_index": PartSpec(heads, unit, (self.capacity,), "int16"),
            "outlier_value": PartSpec(heads, unit, (self.capacity,), self.dtype),
        }
        thresholds = {name: TensorSpec((heads, 1, dim), "float32") for name in ("lower", "upper")}
        return Layout({**base.parts, **sparse}, {**base.constants, **thresholds})

    @property
    def capturable(self) -> bool:
        return self.base.ignoring_capturable

    def _encode(self, x: Tensor) -> Packed:
        blocks = self._blocks(x)
        index = self._most_extreme(x.float())
        clipped = self._blocks(torch.minimum(torch.maximum(x.float(), self._lower), self._upper))
        dense = blocks.float().scatter(3, index, clipped.gather(3, index)).view(x.shape)
        ignored = torch.zeros_like(blocks, dtype=torch.bool).scatter_(3, index, True).view(x.shape)
        packed = self.base.encode_ignoring(dense, ignored)
        unit = self.block_tokens
        sparse = {
            "outlier_index": Part(index.to(torch.int16), unit),
            "outlier_value": Part(to_side(blocks.gather(3, index), self.dtype), unit),
        }
        return Packed(x.shape[2], {**packed.parts, **sparse})

    def check(self, packed: Packed) -> None:
        self.base.check(packed)
        check_index(packed.parts["outlier_index"].tensor, self._numbers)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        x = self.base.decode(packed, dtype)
        index, value = packed.parts["outlier_index"].tensor, packed.parts["outlier_value"].tensor
        self._blocks(x).scatter_(3, index.to(torch.int64), value.to(dtype))
        return x

    def _most_extreme(self, x: Tensor) -> Tensor:
        """Positions of the highest ranks in each block, int64 `[B, H, T / block_tokens, capacity]`."""
        width = (self._upper - self._lower).clamp_min(torch.finfo(torch.float32).tiny)
        excess = torch.maximum(x - self._upper, self._lower - x).div_(width)
        return furthest(self._blocks(excess), self.capacity)

    def _blocks(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], -1, self._numbers)


def block_capacity(fraction: float, head_dim: int, tokens: int = BLOCK_TOKENS) -> int:
    """Number of outliers of a block of `tokens` tokens of a head. UsageError where that is 0, or where 16-bit indices
    cannot address the whole block."""
    numbers = tokens * head_dim
    if int(fraction * numbers) < 1 or numbers > 2**15:
        raise UsageError(
            f"outliers={fraction}: a block of {tokens} tokens by {head_dim} channels needs a fraction of at least "
            f"{1 / numbers:.2g} and at most {2**15} numbers"
        )
    return int(fraction * numbers)


def check_index(index: Tensor, numbers: int) -> None:
    """Raise KvqError for indices of outliers beyond a block of `numbers` numbers."""
    refuse_unless((index >= 0) & (index.to(torch.int64) < numbers), "outlier_index")


def furthest(excess: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of `excess` `[..., numbers]` (float32), the first of equal ones: int64.

    Ranks are unique, so that the choice between equal numbers does not depend on the sorting algorithm.
    """
    return ranks(excess).topk(count, dim=-1).indices


def ranks(x: Tensor) -> Tensor:
    """Unique ranks of the float32 numbers `[..., numbers]`, int64: a number's bits as an ordered integer, then its
    index, of equal numbers the first highest."""
    bits, numbers = x.view(torch.int32), x.shape[-1]
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return rank * numbers - torch.arange(numbers, device=x.device)
