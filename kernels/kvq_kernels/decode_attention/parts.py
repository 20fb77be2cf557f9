"""What one layer's cache hands to decode attention: tensors and how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """numbers: `[B, H, T, D]` float16, bfloat16 or float32."""

    numbers: Tensor


@dataclass(frozen=True)
class Uniform:
    """x' = q s + z (asymmetric), (q - level) s, or in a hybrid per group as the sign of its scale says.

    codes: int32 words `[B, H, T, W]`, planar: channel c of a token is in word c % W at bit `bits * (c // W)`; 3-bit
           codes are the low 2 bits, packed so, followed by the high bit, packed so.
    scale: `[B, H, T / group, D]` (axis "channel": a group is `group` tokens of a channel) or `[B, H, T, D / group]`
           (axis "token"). zero: the same shape, any floating type, or None.
    level: without a zero, the code that stands for 0.
    sign:  words of the scale's shape with one bit per number of the group (x' = -q s where it is set), or None. Where
           scales are negative (hybrid), those groups are asymmetric with |s|, and the word (int32) is their float32 z.
    hybrid: scales may be negative; without `sign`, `zero` then serves those groups.
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
    """A block of l tokens by c channels is one code; x' = centroid std + mean.

    codes:     uint8 `[B, H, T / l, D / c]`; with fewer than 256 entries planar int32 words of log2(entries) bits.
    centroids: `[H or 1, D / share, entries, l * c]`, contiguous; number `j * c + i` is token j, channel i of a block.
    mean, std: float16 or float32 `[H, D]` or None; main loops of kernels multiply in float16.
    token_scale, token_zero: `[B, 1, T]`: x' is then times the token's scale, plus its zero (KVQuant's values); or None.
    """

    codes: Tensor
    centroids: Tensor
    block: tuple[int, int]
    mean: Tensor | None = None
    std: Tensor | None = None
    token_scale: Tensor | None = None
    token_zero: Tensor | None = None


@dataclass(frozen=True)
class Outliers:
    """Numbers that stand for what the codes say at their places.

    index: int16 `[B, H, T / tokens, K]`, token * D + channel within a block of `tokens` tokens of a head; or of all
           heads `[B, 1, T / tokens, K]`, first those of head 0. No place twice.
    value: floating, of the same shape.
    start: of those that lie together int32 `[B, 1, T / tokens, H + 1]`: head h's are [start[h], start[h + 1]).
    """

    index: Tensor
    value: Tensor
    tokens: int
    start: Tensor | None = None


@dataclass(frozen=True)
class PerHead:
    """members[i] is the storage of the kv heads heads[i], in that order; each kv head is one member's."""

    members: tuple[Dense | Uniform | Codebook, ...]
    heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer: row b's tokens [0, sinks) lie in `sinks`, the next count[b] in `packed`, later ones
    in `ring`, token t in slot (t - sinks) % slots.

    count: int32 `[B]` on the device. sinks: `[B, H, sinks, D]` or None. ring: `[B, H, slots, D]` or None where all
    tokens are packed. Tensors may be views; rows of all of them are contiguous. outliers: of the packed tokens.
    norm: float32 `[B, H, D]`; what is packed was divided by it, and the side is to be read as if sinks and ring were,
    too: of keys, q . k = (q norm) . (k / norm), where the caller multiplies the query. None: 1.
    """

    packed: Dense | Uniform | Codebook | PerHead
    count: Tensor
    sinks: Tensor | None = None
    ring: Tensor | None = None
    outliers: Outliers | None = None
    norm: Tensor | None = None


@dataclass(frozen=True)
class Rope:
    """Keys are kept before RoPE: the key of token t of row b is R(t + offset[b]) k, with pairs (n, n + width / 2) in
    style "half", (2n, 2n + 1) in style "interleaved", turned by position times `frequencies` `[width / 2]` (radians,
    float32) and multiplied by `scale`; channels from `width` on are left alone. offset: int32 `[B]` or None (0).
    Cosines and sines of positions below `positions` are made once, in two tables of `STEP` and positions / STEP rows.
    """

    STEP = 128

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
        """coarse `[ceil(positions / STEP), 2, width / 2]`: cos, sin of multiples of STEP, times scale; fine `[STEP, 2,
        width / 2]`: of 0 ... STEP - 1; float32, from float64 angles. fine_half: `fine` in float16."""

        def table(first: int, last: int, step: int, gain: float) -> Tensor:
            at = torch.arange(first, last, step, device=frequencies.device, dtype=torch.float64)
            angles = at[:, None] * frequencies.double()
            return (torch.stack([angles.cos(), angles.sin()], dim=1) * gain).float().contiguous()

        whole = -(-positions // cls.STEP) * cls.STEP
        fine = table(0, cls.STEP, 1, 1.0)
        return cls(style, frequencies, scale, table(0, whole, cls.STEP, scale), fine, fine.half(), offset)
