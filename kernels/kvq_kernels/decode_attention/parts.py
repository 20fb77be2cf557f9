"""Inputs of decode attention: tensors of one layer's cache.

`Side` is the keys or the values, whose packed tokens are in one of the `formats`, or in different ones (`PerHead`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from kvq_kernels.decode_attention.formats.codebook import Codebook
from kvq_kernels.decode_attention.formats.dense import Dense
from kvq_kernels.decode_attention.formats.directions import Directions
from kvq_kernels.decode_attention.formats.transformed import Transformed
from kvq_kernels.decode_attention.formats.uniform import Uniform

#: Storage formats of heads that are stored alike.
Packed: TypeAlias = Dense | Uniform | Codebook | Directions | Transformed


@dataclass(frozen=True)
class Outliers:
    """Outliers: exact numbers that replace the dequantized ones at their positions.

    index: int16 `[B, H, T / tokens, K]`, token * D + channel within a block of `tokens` tokens of a head; or pooled
           over all heads, `[B, 1, T / tokens, K]`, head 0's first. No position twice.
    value: floating, of the same shape.
    start: of pooled outliers, int32 `[B, 1, T / tokens, H + 1]`: head h has [start[h], start[h + 1]).
    """

    index: Tensor
    value: Tensor
    tokens: int
    start: Tensor | None = None


@dataclass(frozen=True)
class PerHead:
    """Different storage per kv head: members[i] holds the kv heads heads[i], in that order; each head is in one."""

    members: tuple[Packed, ...]
    heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Pages:
    """Block table of a side whose packed tokens are in pages: packed token t of row b is at place p = t + first, that
    is token p % block_size of page block_table[b, p // block_size].

    Stored tensors of `Side.packed` and `Side.outliers` then have pages instead of rows: `[pages, H, T, W]` with T for
    `block_size` tokens, or `[pages, H, cells, T, W]`, where the T of a cell are contiguous. They are views of one
    allocation (`pages.cell_views`), with the same strides of pages and cells in bytes. Constants (centroids, mean, std)
    have no pages.

    block_table: int32 `[B, blocks]`; entries from a row's last place on are not read. Rows may share pages.
    block_size: tokens of a page: whole groups of each tensor, and of each cell whole tiles of the kernel.
    slots: int32 `[B]`, the index of row b in `sinks`, `ring` and `norm`; None: b.
    first: place of packed token 0: whole groups and codes, the same for keys and values. Places before it are not read.
    """

    block_table: Tensor
    block_size: int
    slots: Tensor | None = None
    first: int = 0


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer: row b's tokens [0, sinks) are in `sinks`, the next count[b] in `packed`, later ones
    in the ring buffer `ring`, token t at (t - sinks) % ring_size.

    count: int32 `[B]` on the device. sinks: `[B, H, sinks, D]` or None. ring: `[B, H, ring_size, D]` or None where all
    tokens are packed. Tensors may be views; tokens of a head are contiguous. outliers: of the packed tokens.
    norm: float32 `[B, H, D]` that packed numbers were divided by; kernels divide sinks and ring by it when they read
    them. For keys, q . k = (q norm) . (k / norm), where the caller multiplies the query. None: 1.
    pages: the block table of packed tokens and outliers; None: row b's are one run of memory.
    """

    packed: Packed | PerHead
    count: Tensor
    sinks: Tensor | None = None
    ring: Tensor | None = None
    outliers: Outliers | None = None
    norm: Tensor | None = None
    pages: Pages | None = None

    @property
    def members(self) -> tuple[Packed, ...]:
        """Storage of the packed tokens of all heads, in parts that are stored alike."""
        return self.packed.members if isinstance(self.packed, PerHead) else (self.packed,)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of keys that are cached before RoPE: the key of token t of row b is R(t + offset[b]) k.

    Pairs (n, n + width / 2) in style "half", (2n, 2n + 1) in style "interleaved" are rotated by position times
    `frequencies` `[width / 2]` (radians, float32) and multiplied by `scale`; channels from `width` on are not. offset:
    int32 `[B]` or None (0). Cosines and sines come from two tables, of `STEP` and of positions / STEP rows.
    """

    STEP: ClassVar[int] = 128

    style: Literal["half", "interleaved"]
    frequencies: Tensor
    scale: float
    coarse: Tensor
    fine: Tensor
    fine_half: Tensor
    offset: Tensor | None = None

    @classmethod
    def tables(
        cls,
        style: Literal["half", "interleaved"],
        frequencies: Tensor,
        positions: int,
        scale: float = 1.0,
        offset: Tensor | None = None,
    ) -> Rope:
        """Tables for positions below `positions`, those of all tokens, with offsets: coarse
        `[ceil(positions / STEP), 2, width / 2]`, cos and sin of multiples of STEP, times scale; fine
        `[STEP, 2, width / 2]`, of 0 ... STEP - 1; float32, from float64 angles. fine_half: `fine` in float16."""

        def table(first: int, last: int, step: int, gain: float) -> Tensor:
            at = torch.arange(first, last, step, device=frequencies.device, dtype=torch.float64)
            angles = at[:, None] * frequencies.double()
            return (torch.stack([angles.cos(), angles.sin()], dim=1) * gain).float().contiguous()

        whole = -(-positions // cls.STEP) * cls.STEP
        fine = table(0, cls.STEP, 1, 1.0)
        return cls(style, frequencies, scale, table(0, whole, cls.STEP, scale), fine, fine.half(), offset)
