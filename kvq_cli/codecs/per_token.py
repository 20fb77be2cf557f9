"""Per-token scaling to [-1, 1], outliers excluded: KVQuant's values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part, refuse_unless, side_dtype, to_side
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.outliers import BLOCK_TOKENS, block_capacity, check_index, furthest
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class PerTokenCodec(Codec):
    """x' = scale base((x - zero) / scale) + zero, where zero +- scale is the range of a token's numbers over all kv
    heads, outliers excluded. Outliers are stored in 16 bits with their indices.

    base:     a codec of single tokens; it encodes numbers in [-1, 1], up to the rounding of zero and scale to 16 bits.
    outliers: fraction of a token's `kv_heads * head_dim` numbers, see `capacity`; 0: none.

    As in KVQuant, a token has one range and one list of outliers for all heads: per head they would cost up to half a
    bit per number. Outliers of `BLOCK_TOKENS` tokens are stored together, those of head 0 first, so that each head's
    are contiguous.

    Parts: the base codec's; `zero` and `scale` `[B, 1, T, 1]` in 16 bits, unit 1. With outliers, unit block_tokens:
    `outlier_index` int16 (token * head_dim + channel within the block) and `outlier_value` in 16 bits, both `[B, 1, T /
    block_tokens, block_tokens * capacity]`; `outlier_start` int32 `[B, 1, T / block_tokens, kv_heads + 1]`, where the
    outliers of each head begin.
    """

    def __init__(self, base: Codec, kv_heads: int, head_dim: int, outliers: float, dtype: torch.dtype | str) -> None:
        self.base, self.dtype, self.outliers, self.head_dim = base, side_dtype(dtype), outliers, head_dim
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits
        self.kernel_tile = base.kernel_tile
        if outliers:
            self.block_tokens = math.lcm(BLOCK_TOKENS, base.block_tokens)
            block_capacity(outliers, head_dim, self.block_tokens)

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        base, unit = self.base.layout(heads, dim, dtype), self.block_tokens
        parts = {**base.parts, **{name: PartSpec(1, 1, (1,), self.dtype) for name in ("zero", "scale")}}
        if self.outliers:
            slots = unit * capacity(self.outliers, self._listed_heads(heads) * dim)
            parts["outlier_index"] = PartSpec(1, unit, (slots,), "int16")
            parts["outlier_value"] = PartSpec(1, unit, (slots,), self.dtype)
            parts["outlier_start"] = PartSpec(1, unit, (heads + 1,), "int32")
        return Layout(parts, base.constants)

    @property
    def unread_by_kernels(self) -> str | None:
        return self.base.unread_by_kernels

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Codebook

        stored = self.base.kernel_storage(parts, rotation)
        assert isinstance(stored, Codebook)
        scale, zero = (parts[name].tensor.squeeze(3) for name in ("scale", "zero"))
        return replace(stored, token_scale=scale, token_zero=zero)

    def _listed_heads(self, heads: int) -> int:
        """How many heads the lists of outliers of a codec for `heads` heads have."""
        return heads

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()

    def _encode(self, x: Tensor) -> Packed:
        batch, heads, tokens, dim = x.shape
        rows = x.transpose(1, 2).flatten(2)  # [B, T, H * D]
        inner, index = split_outliers(rows.float(), self.outliers)
        zero, scale = ranges(inner, self.dtype)
        dense = ((inner - zero) / divisor(scale)).view(batch, tokens, heads, dim).transpose(1, 2)
        sides = {"zero": Part(zero.unsqueeze(1), 1), "scale": Part(scale.unsqueeze(1), 1)}
        if self.outliers:
            lists = self._by_head(index, to_side(rows.gather(2, index), self.dtype), heads, dim)
            sides |= {name: Part(tensor.unsqueeze(1), self.block_tokens) for name, tensor in lists.items()}
        return Packed(tokens, {**self.base.encode(dense).parts, **sides})

    def _by_head(self, index: Tensor, value: Tensor, heads: int, dim: int) -> dict[str, Tensor]:
        """The lists of blocks from those of tokens, places int64 and values `[B, T, capacity]`."""
        batch, tokens, capacity = index.shape
        token = torch.arange(tokens, device=index.device).unsqueeze(1) % self.block_tokens
        numbers = self.block_tokens * dim
        place = index.div(dim, rounding_mode="floor") * numbers + token * dim + index % dim
        lists = batch, tokens // self.block_tokens, self.block_tokens * capacity
        place, order = place.view(lists).sort(dim=2)
        bounds = torch.arange(heads + 1, device=index.device) * numbers
        return {
            "outlier_index": (place % numbers).to(torch.int16),
            "outlier_value": value.reshape(lists).gather(2, order),
            "outlier_start": torch.searchsorted(place, bounds.expand(*lists[:2], -1).contiguous(), out_int32=True),
        }

    def check(self, packed: Packed) -> None:
        self.base.check(packed)
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")
        if self.outliers:
            index, start = (packed.parts[f"outlier_{name}"].tensor for name in ("index", "start"))
            check_index(index, self.block_tokens * self.head_dim)
            refuse_unless(start.diff(dim=3) >= 0, "outlier_start")
            refuse_unless(self._in_list(start[..., 0], start[..., -1], index.shape[3]), "outlier_start")

    def _in_list(self, first: Tensor, last: Tensor, slots: int) -> Tensor:
        """Whether the outliers of the codec's heads, [first, last), can stand in a list of `slots` outliers."""
        return (first == 0) & (last == slots)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        parts = {name: part.tensor for name, part in packed.parts.items()}
        x = self.base.decode(packed, torch.float32).mul_(parts["scale"]).add_(parts["zero"]).to(dtype)
        if self.outliers:
            batch, _, tokens, dim = x.shape
            index = parts["outlier_index"].squeeze(1).to(torch.int64)  # [B, T / block_tokens, slots]
            slot = torch.arange(index.shape[2], device=x.device).unsqueeze(1)
            head = self._head(slot, parts["outlier_start"].squeeze(1)[:, :, None])
            first = torch.arange(index.shape[1], device=x.device).unsqueeze(1) * (self.block_tokens * dim)
            place = head * (tokens * dim) + first + index
            values = parts["outlier_value"].to(dtype)
            self._insert(x.view(batch, -1), head.flatten(1), place.flatten(1), values.flatten(1))
        return x

    def _head(self, slot: Tensor, start: Tensor) -> Tensor:
        """The head of each slot of a list, from `start` `[.., heads + 1]`; in a block that was never written, whose
        starts are 0, the last head."""
        return (slot >= start[..., 1:-1]).sum(-1)

    def _insert(self, x: Tensor, head: Tensor, place: Tensor, values: Tensor) -> None:
        """Write outliers to their places: x `[B, numbers]`; the head, place and value of each, `[B, outliers]`."""
        x.scatter_(1, place, values)


def capacity(outliers: float, numbers: int) -> int:
    """Number of outliers of a token of `numbers` numbers: the fraction `outliers` rounded down, at least one."""
    return max(1, int(outliers * numbers)) if outliers else 0


def split_outliers(x: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """(tokens `x` `[..., numbers]` float32 with outliers clamped to the range of the other numbers, indices of the
    outliers, int64 `[..., capacity]`).

    A token's thresholds are its quantiles outliers / 2 and 1 - outliers / 2 (interpolated). Its outliers are the
    numbers furthest outside of them: a fixed number, even where fewer are outside.
    """
    numbers = x.shape[-1]
    if not outliers:
        return x, x.new_empty(*x.shape[:-1], 0, dtype=torch.int64)
    place = outliers / 2 * (numbers - 1)
    inner, outer = min(int(place) + 1, numbers - 1), int(place)

    def threshold(x: Tensor) -> Tensor:
        largest = x.topk(inner + 1, dim=-1).values  # a token's few largest: faster than to sort it
        below, above = largest[..., inner, None], largest[..., outer, None]
        return above - (above - below) * (place - outer)

    excess = torch.maximum(x - threshold(x), -x - threshold(-x))
    index = furthest(excess, capacity(outliers, numbers))
    low = x.scatter(-1, index, torch.inf).amin(dim=-1, keepdim=True)
    high = x.scatter(-1, index, -torch.inf).amax(dim=-1, keepdim=True)
    # Where all numbers are outliers, the codes do not matter.
    return torch.where(low <= high, x.clamp(low, high), 0), index


def ranges(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Middle and half range of each token of `x` `[..., numbers]`, `[..., 1]` each, rounded to `dtype`."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    return to_side((low + high) / 2, dtype), to_side((high - low) / 2, dtype)


def divisor(scale: Tensor) -> Tensor:
    """`scale` in float32; 1 for a token whose numbers are all the same, which decodes to zero times scale plus zero."""
    return scale.float().masked_fill(scale == 0, 1)
