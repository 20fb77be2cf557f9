"""Inputs of decode attention: tensors of one layer's cache and their storage formats.

`Side` is the keys or the values, `Dense`, `Uniform`, `Codebook`, `Transformed` and `PerHead` are formats of its packed
tokens. `spec.py` describes them to the compiler, `reference.py` unpacks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from kvq_kernels.decode_attention.transformed import Transformed


@dataclass(frozen=True)
class Dense:
    """16- or 32-bit numbers, not quantized: `[B, H, T, D]` float16, bfloat16 or float32."""

    numbers: Tensor


@dataclass(frozen=True)
class Uniform:
    """Uniform codes in groups: x' = q s + z (asymmetric), (q - level) s, or in a hybrid either, by the sign of s.

    codes: int32 words `[B, H, T, W]`, planar: channel c of a token is in word c % W at bit `bits * (c // W)`; 3-bit
           codes are the low 2 bits, packed so, followed by the high bit, packed so.
    scale: `[B, H, T / group, D]` (axis "channel": a group is `group` tokens of a channel) or `[B, H, T, D / group]`
           (axis "token"). zero: the same shape, any floating type, or None.
    level: without a zero, the code of 0.
    sign:  words of the scale's shape with one bit per number of the group (x' = -q s where it is set), or None. In a
           hybrid, the word (int32) of an asymmetric group is its float32 z.
    hybrid: groups with a negative scale are asymmetric with |s|; their z is in `sign`.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    axis: Literal["channel", "token"]
    group: int
    zero: Tensor | None = None
    level: int = 0
    sign: Tensor | None = None
    hybrid: bool = False


@dataclass(frozen=True)
class Codebook:
    """Codebook entries: a block of l tokens by c channels is one code; x' = centroid std + mean.

    codes:     uint8 `[B, H, T / l, D / c]`; with fewer than 256 entries planar int32 words of log2(entries) bits.
    centroids: `[H or 1, D / share, entries, l * c]`, contiguous; number `j * c + i` is token j, channel i of a block.
    mean, std: float16 or float32 `[H, D]`, or None both; kernels multiply them in float16.
    token_scale, token_zero: `[B, 1, T]`, or None both: x' is then multiplied by the token's scale and its zero is added
    (KVQuant's values).
    """

    codes: Tensor
    centroids: Tensor
    block: tuple[int, int]
    mean: Tensor | None = None
    std: Tensor | None = None
    token_scale: Tensor | None = None
    token_zero: Tensor | None = None


#: Storage formats of heads that are stored alike.
Packed: TypeAlias = Dense | Uniform | Codebook | Transformed


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
